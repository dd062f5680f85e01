"""Mixture of experts: load balancing, and recording and replaying of router decisions."""
