"""Token files of Megatron (`.bin` and `.idx`) and nanoGPT (`.bin`), read by memory map."""
