"""Generation engines, rewards and weight sync."""
