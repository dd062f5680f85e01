"""Megatron-core's documented pipeline interface, under its names, for programs written for it."""
