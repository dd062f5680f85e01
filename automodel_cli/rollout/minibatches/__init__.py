"""Minibatches of a rollout: log-probs, advantages, routing replay and prompt sharing."""
