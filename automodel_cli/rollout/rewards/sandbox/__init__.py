"""What runs inside the sandbox: plain scripts of the standard library, started by `host.py`."""
