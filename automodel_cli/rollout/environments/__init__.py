"""Environments of ours, a node each."""
