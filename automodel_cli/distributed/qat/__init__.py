"""Fake quantization of linear layers for quantization-aware training: formats, and layers under every layout."""
