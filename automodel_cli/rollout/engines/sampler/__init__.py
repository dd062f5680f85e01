"""Built-in sampler: slots of a decoding batch, KV cache, recurrent state, CUDA graphs."""
