"""Generation engines: the built-in sampler, transformers, and servers."""
