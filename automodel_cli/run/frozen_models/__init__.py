"""Frozen models next to the policy: reference models, teachers and caches of their log-probs."""
