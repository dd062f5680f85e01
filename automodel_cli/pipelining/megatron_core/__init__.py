"""Megatron-core's documented pipeline interface, kept by name for programs written against it."""
