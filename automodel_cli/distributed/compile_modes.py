"""Values of `parallelizer.enable_compile` and of other options that name a mode instead of true or false."""

AUTO = "auto"
"""The choice depends on the device, or on the memory."""
FUSED_OPS = "fused_ops"
"""Only functions of elementwise operations are compiled, not whole layers."""
