"""Activation checkpointing, and the results that it saves."""
