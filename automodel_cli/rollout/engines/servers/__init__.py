"""Engines on servers: clients of vLLM and SGLang, weights on their way there, servers that a run starts."""
