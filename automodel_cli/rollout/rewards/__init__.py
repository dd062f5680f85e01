"""Rewards: config classes that score samples, each with a weight."""
