"""The engine of our own: slots of a batch, their keys, values and states, and the decoding that fills them."""
