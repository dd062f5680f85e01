"""From rows to batches: tokenization, packing, cache, validation split, data loader and reports."""
