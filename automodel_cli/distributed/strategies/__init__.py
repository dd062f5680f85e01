"""One folder per strategy of data parallelism: its node, and what it does to a part."""
