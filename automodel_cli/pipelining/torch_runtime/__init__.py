"""Executing a program on torch.distributed.pipelining."""
