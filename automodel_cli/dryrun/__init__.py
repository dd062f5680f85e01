"""The real step of any config at its real size on fake CUDA tensors: what `automodel dryrun` measures without a GPU."""
