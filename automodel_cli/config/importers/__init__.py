"""Configs of other tools as configs of ours: one table a tool, one engine."""
