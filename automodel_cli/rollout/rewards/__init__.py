"""Rewards: what a completion is worth, as config nodes with a weight each."""
