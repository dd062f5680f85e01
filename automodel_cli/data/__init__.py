"""Datasets: read rows, tokenize, mask, pack and batch them. Data loading is sharded and resumable."""
