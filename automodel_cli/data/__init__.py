"""Rows to tokens, loss mask, packed rows and `Batch`es; stateful, sharded and resumable."""
