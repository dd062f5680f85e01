"""Fully sharded data parallelism by NVIDIA's package megatron-fsdp."""
