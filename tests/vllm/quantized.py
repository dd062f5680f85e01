"""vLLM's log-probs of quantized exports, as JSON: run by test_quantized.py in vLLM's environment."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from torch import nn
from vllm import LLM, SamplingParams

from tests.vllm import dequantizing


def used(model: nn.Module) -> list[str]:
    """The schemes of layers with their kernels, and the methods of experts."""
    found = set()
    for module in model.modules():
        if scheme := getattr(module, "scheme", None):
            kernels = [kind for part in vars(scheme).values() if is_kernel(kind := type(part))]
            found.add(" ".join(kind.__name__ for kind in (type(scheme), *kernels)))
        elif isinstance(method := getattr(module, "quant_method", None), dequantizing.Experts):
            found.add(type(method).__name__)
    return sorted(found)


def is_kernel(kind: type) -> bool:
    return kind.__module__ == dequantizing.__name__ or ".kernels." in kind.__module__


def main(asked: Path) -> None:
    dequantizing.install()
    answers, models = {}, []
    folders, rows = json.loads(asked.read_text())
    asking = [{"prompt_token_ids": row} for row in rows]
    for name, folder in folders.items():
        try:
            model = LLM(
                folder, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=8, skip_tokenizer_init=True
            )
        except (ValueError, NotImplementedError) as error:
            answers[name] = {"error": str(error)}
            continue
        models.append(model)  # an engine that is freed ends the process groups of the others
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        found = model.generate(asking, params, use_tqdm=False)
        logprobs = [
            [place[token].logprob for place, token in zip(one.prompt_logprobs[1:], row[1:], strict=True)]
            for one, row in zip(found, rows, strict=True)
        ]
        answers[name] = {"logprobs": logprobs, "used": model.apply_model(used)[0]}
    asked.with_name("answers.json").write_text(json.dumps(answers))


if __name__ == "__main__":  # vLLM imports this file again in its own processes
    main(Path(sys.argv[1]))
