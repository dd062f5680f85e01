"""Data-parallel strategies, one folder each: the config node, and the function that shards a part."""
