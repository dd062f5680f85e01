"""Megatron-core's documented pipeline interface, kept by name. `AutoPipeline(runtime="eager")` runs on it."""
