"""How a user starts a server that training can use, for the errors that say so. Torch-free."""

VLLM = "vllm serve MODEL --logprobs-mode processed_logprobs"
VLLM_WITH_EXPERTS = "vllm serve MODEL --enable-return-routed-experts"
SGLANG = "python -m sglang.launch_server --model-path MODEL"
SGLANG_WITH_EXPERTS = f"{SGLANG} --enable-return-routed-experts"
