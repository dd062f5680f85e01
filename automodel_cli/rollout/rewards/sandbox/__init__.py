"""Sandbox of generated code: standard-library scripts that `host.py` starts in isolated processes."""
