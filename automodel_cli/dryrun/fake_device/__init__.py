"""A CUDA device without values: kernels, collectives, memory and time of what runs on it."""
