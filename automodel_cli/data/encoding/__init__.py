"""From rows to tokens and loss masks: documents of each kind, in this process or in worker processes."""
