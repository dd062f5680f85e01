"""What vLLM answers for exports that are no language models, as JSON: run by test_pooling.py in vLLM's environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vllm import LLM, PoolingParams


def main(asked: Path) -> None:
    answers, models = {}, []
    for name, (folder, task, texts) in json.loads(asked.read_text()).items():
        model = LLM(folder, runner="pooling", dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=8)
        models.append(model)  # an engine that is freed ends the process groups of the others
        raw = None if task == "embed" else PoolingParams(task=task, use_activation=False)
        found = model.encode(texts, pooling_task=task, pooling_params=raw)
        answers[name] = {
            "tokens": [list(one.prompt_token_ids) for one in found],
            "values": [one.outputs.data.tolist() for one in found],
        }
        if task == "classify":
            answers[name]["probs"] = [one.outputs.probs for one in model.classify(texts)]
    asked.with_name("answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":  # vLLM imports this file again in its own processes
    main(Path(sys.argv[1]))
