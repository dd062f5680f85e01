"""Memory of a run: automatic activation checkpointing, free host memory and out-of-memory errors."""
