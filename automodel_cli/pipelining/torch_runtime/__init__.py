"""Execute programs on torch.distributed.pipelining."""
