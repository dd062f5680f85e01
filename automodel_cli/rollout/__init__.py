"""The model's own samples: engines that generate, rewards, environments, and the updates made of them."""
