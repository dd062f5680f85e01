"""How long a schedule takes and what it looks like: simulator and pictures."""
