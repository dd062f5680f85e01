"""`python tests/vllm_stand_in.py serve MODEL --port PORT ...`: the double of vLLM's endpoints, started as vLLM is.

It holds MODEL, computes what it serves, and prints the words that it was started with and every call.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))


def main() -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from automodel_cli.rollout.engines.transformers_engine import HFEngine
    from tests.unit.rollout.engines.servers.test_http_engine_servers import VLLMDouble

    torch.set_num_threads(1)
    words = sys.argv[1:]
    assert words[0] == "serve"
    seen = {name: os.environ.get(name) for name in ("VLLM_SERVER_DEV_MODE", "CUDA_VISIBLE_DEVICES", "RANK")}
    print(json.dumps({"words": words, "environment": seen, "node": os.environ.get("SLURMD_NODENAME")}), flush=True)
    model = AutoModelForCausalLM.from_pretrained(words[1], dtype=torch.float32).eval()
    stop = AutoTokenizer.from_pretrained(words[1]).eos_token_id
    port = int(words[words.index("--port") + 1])
    double = VLLMDouble(HFEngine(model, stop_token_ids=[stop], pad_token_id=0), port)
    told = 0
    while True:
        for path, _ in double.calls[told:]:
            print(path, flush=True)
            told += 1
        time.sleep(0.05)


if __name__ == "__main__":
    main()
