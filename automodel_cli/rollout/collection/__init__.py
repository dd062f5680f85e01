"""Collection of samples: single responses, episodes, and the queue of asynchronous rollouts."""
