"""What a run leaves for people: plots and the offline report."""
