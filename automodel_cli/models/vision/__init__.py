"""Vision-language models: front end, processor, probe."""
