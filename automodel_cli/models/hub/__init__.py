"""Reading model repositories: configs, safetensors and GGUF files, quantized and multimodal checkpoints."""
