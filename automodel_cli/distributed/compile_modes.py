"""Named values of `parallelizer.enable_compile` and of other options that are otherwise true or false."""

AUTO = "auto"
"""Depends on the device or on the available memory."""
FUSED_OPS = "fused_ops"
"""Compile elementwise regions only, not whole layers."""
