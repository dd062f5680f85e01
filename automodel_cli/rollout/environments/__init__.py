"""Environments for multi-turn rollouts: tools, MCP servers, verifiers, and the runner of episodes."""
