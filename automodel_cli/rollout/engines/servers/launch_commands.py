"""Commands that start a suitable server, for fixes in error messages. Torch-free."""

VLLM = "vllm serve MODEL --logprobs-mode processed_logprobs"
VLLM_WITH_EXPERTS = "vllm serve MODEL --enable-return-routed-experts"
SGLANG = "python -m sglang.launch_server --model-path MODEL"
SGLANG_WITH_EXPERTS = f"{SGLANG} --enable-return-routed-experts"
