"""Tokens and CPU seconds of an update whose responses share their prompt, and of the same without:
`python scripts/bench_shared_prompts.py [--prompt N] [--response N] [--group N] [--groups N] [--seq-len N]`.

A llama of 4 layers of width 128 with random weights, one thread; forward and backward of all microbatches of one row,
in turns. Rows are laid out as a GRPO run lays them out.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from transformers import LlamaConfig

from automodel_cli.data.preparation.prompt_dataset import Prompt
from automodel_cli.models.attention.packed import register_packed_attention
from automodel_cli.models.builder import part_of
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.rollout.samples import Minibatch, PackingConfig, pack_minibatches
from automodel_cli.rollout.types import Sample, Score

_VOCAB = 512


def model() -> ModelPart:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=_VOCAB,
        max_position_embeddings=32768,
    )
    return part_of(config, ModelConfig(pretrained="-"), device="cpu")


def given_samples(arguments: argparse.Namespace) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> list[int]:
        ids: list[int] = torch.randint(3, _VOCAB, (count,), generator=generator).tolist()
        return ids

    samples = []
    for place in range(arguments.groups):
        prompt = Prompt(place, tokens(arguments.prompt), [], {}, f"prompt {place}")
        for index in range(arguments.group):
            response = tokens(arguments.response)
            logprobs = [-5.0] * len(response)
            samples.append(Sample(place, index, prompt, response, logprobs, "", "stop", 0, Score(0.0, {}, {})))
    return samples


def seconds(part: ModelPart, update: Minibatch) -> tuple[float, dict[str, torch.Tensor]]:
    """CPU seconds of forward and backward, and the gradients."""
    part.zero_grad()
    began = time.process_time()
    for batch in update.batches:
        part(**batch.head_inputs(), **batch.model_inputs()).logprobs_BT.sum().backward()
    spent = time.process_time() - began
    return spent, {name: p.grad.clone() for name, p in part.named_parameters() if p.grad is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("prompt", 512), ("response", 64), ("group", 8), ("groups", 4), ("seq-len", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    register_packed_attention()
    part, samples = model(), given_samples(arguments)
    updates, spent = {}, dict[bool, list[float]]({False: [], True: []})
    for share in spent:
        plan = PackingConfig(arguments.seq_len, True, 1, microbatch_size=1, pad_id=0, share_prompt_prefix=share)
        units = [(number,) for number in range(len(samples))]
        (updates[share],) = pack_minibatches(samples, units, 1, plan, dp_rank=0, dp_size=1)
    gradients = {}
    for _ in range(arguments.rounds):
        for share, update in updates.items():
            taken, gradients[share] = seconds(part, update)
            spent[share].append(taken)
    for share, update in updates.items():
        rows = len(update.batches)
        median = statistics.median(spent[share])
        print(f"shared={share!s:5}  {rows} rows, {rows * arguments.seq_len:,} tokens, {median:.3f} CPU s")
    apart, shared = (statistics.median(values) for values in spent.values())
    off = max(((gradients[True][n] - g).norm() / g.norm()).item() for n, g in gradients[False].items())
    print(f"{apart / shared:.2f} times as fast; gradients differ by {off:.1e}")


if __name__ == "__main__":
    main()
