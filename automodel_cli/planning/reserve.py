"""What is left free on a GPU. Torch-free."""

RESERVE_GIB = 5.0
"""CUDA context, cuBLAS workspaces, NCCL buffers and fragmentation, which no count of tensors sees."""
