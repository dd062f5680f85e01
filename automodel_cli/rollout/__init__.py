"""Rollouts: engines that generate, rewards, environments, and minibatches of the generated samples."""
