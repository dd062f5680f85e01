"""Low-rank adapters: where they are placed, computed, loaded and exported."""
