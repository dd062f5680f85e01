"""What is left free on a GPU. Torch-free."""

CARD_GIB = 79.1
"""What torch can allocate on an H100 or A100 of 80 GB."""
RESERVE_GIB = 5.0
"""CUDA context, cuBLAS workspaces, NCCL buffers and fragmentation, which no count of tensors sees."""


def usable_bytes(memory_gib: float) -> float:
    """Bytes that tensors may take of a GPU on which torch can allocate so many GiB; below 0 where there are none."""
    return (memory_gib - RESERVE_GIB) * 2**30
