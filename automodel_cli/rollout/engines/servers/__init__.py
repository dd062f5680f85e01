"""Generation servers: clients of vLLM and SGLang, and servers that a run starts."""
