"""Tokens per second of generation: our sampler, Hugging Face `generate`, Hugging Face continuous batching.

    python scripts/bench_rollout.py [--model llama-60m] [--prompts 48] [--slots 16] [--rounds 3]

One run, rounds interleaved, the same prompts and the same lengths for all three: each prompt is to be continued by its
own number of tokens, drawn from a wide range (mixed lengths, as rollouts are), greedily, in float32 on the CPU's
threads or in bfloat16 on a GPU. Only tokens of completions count. `generate` gets batches of neighbouring prompt
length; it has no length of its own for each prompt, so every batch runs to the longest of its completions and the rest
is thrown away, which is what it does with sequences that end early. Prints the median of the rounds and writes them as
JSON with `--out`.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaConfig, Qwen3MoeConfig

from automodel_cli.models.attention.packed import PACKED, packed_attention, register_packed_attention
from automodel_cli.models.lm_head.head import HeadKind
from automodel_cli.models.model_part import ModelPart
from automodel_cli.rollout.engines.sampler.decoder import Decoder
from automodel_cli.rollout.engines.sampler.sampler import Sampler
from automodel_cli.rollout.types import SamplingParams

MODELS = {
    "llama-tiny": LlamaConfig(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=354,
    ),
    "llama-60m": LlamaConfig(
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=32_000,
    ),
    "qwen3-moe-small": Qwen3MoeConfig(
        hidden_size=256,
        moe_intermediate_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        vocab_size=8_000,
    ),
}


@dataclass(frozen=True)
class Work:
    """Prompts, and how many tokens each is continued by."""

    prompts: list[list[int]]
    lengths: list[int]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


def make_work(count: int, samples: int, vocab: int, longest_prompt: int, longest: int, seed: int) -> Work:
    """`samples` completions of each prompt, as a group of GRPO is; lengths are log-uniform."""
    rng = random.Random(seed)
    prompts = []
    for _ in range(count // samples):
        length = round(8 * (longest_prompt / 8) ** rng.random())
        prompts += [[rng.randrange(3, vocab) for _ in range(length)]] * samples
    return Work(prompts, [round(8 * (longest / 8) ** rng.random()) for _ in prompts])


def run_sampler(part: ModelPart, work: Work, slots: int, device: torch.device) -> int:
    sampler = Sampler(Decoder.from_part(part, device), packed_attention, stop_token_ids=[], max_num_seqs=slots)
    completions = sampler.generate(work.prompts, SamplingParams(temperature=0.0), limits=work.lengths)
    return sum(len(completion.tokens) for completion in completions)


def run_generate(model, work: Work, slots: int, device: torch.device) -> int:  # type: ignore[no-untyped-def]
    order = sorted(range(len(work.prompts)), key=lambda i: len(work.prompts[i]))
    for start in range(0, len(order), slots):
        batch = order[start : start + slots]
        width = max(len(work.prompts[i]) for i in batch)
        ids = torch.zeros(len(batch), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(batch):
            ids[row, width - len(work.prompts[i]) :] = torch.tensor(work.prompts[i])
            mask[row, width - len(work.prompts[i]) :] = 1
        config = GenerationConfig(
            do_sample=False, max_new_tokens=max(work.lengths[i] for i in batch), pad_token_id=0, eos_token_id=None
        )
        model.generate(ids.to(device), attention_mask=mask.to(device), generation_config=config)
    return work.num_tokens


def run_continuous(model, work: Work, slots: int) -> int:  # type: ignore[no-untyped-def]
    """The library's manager, so that each request has its own length."""
    config = GenerationConfig(do_sample=False, max_new_tokens=max(work.lengths), pad_token_id=0, eos_token_id=-1)
    longest = max(map(len, work.prompts)) + max(work.lengths)
    blocks = {"num_blocks": max(64, slots * longest // 16), "max_batch_tokens": max(256, slots * 4)}
    manager = model.init_continuous_batching(
        generation_config=config, continuous_batching_config=ContinuousBatchingConfig(**blocks)
    )
    manager.start()
    try:
        for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
            manager.add_request(prompt, request_id=f"r{i}", max_new_tokens=length)
        done = 0
        tokens = 0
        while done < len(work.prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done, tokens = done + 1, tokens + len(result.generated_tokens)
        return tokens
    finally:
        manager.stop(block=True)


def measure(run: Callable[[], int], clock: Callable[[], float]) -> float:
    gc.collect()
    started = clock()
    tokens = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return tokens / (clock() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-60m")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--samples", type=int, default=4, help="completions of each prompt")
    parser.add_argument("--slots", type=int, default=16, help="sequences at once, for all three")
    parser.add_argument("--longest-prompt", type=int, default=96)
    parser.add_argument("--longest", type=int, default=192, help="tokens of the longest completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="count this process's processor time, not the wall clock: for one thread on a machine that others use too",
    )
    parser.add_argument("--out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_config(MODELS[args.model], attn_implementation="sdpa", dtype=dtype)
    model = model.to(device).eval()
    register_packed_attention()
    part = ModelPart(model, HeadKind("plain")).eval()
    work = make_work(args.prompts, args.samples, model.config.vocab_size, args.longest_prompt, args.longest, 0)

    def sampler() -> int:
        model.set_attn_implementation(PACKED)
        return run_sampler(part, work, args.slots, device)

    def generate() -> int:
        model.set_attn_implementation("sdpa")
        return run_generate(model, work, args.slots, device)

    def continuous() -> int:
        model.set_attn_implementation("sdpa")
        return run_continuous(model, work, args.slots)

    engines = {"sampler": sampler, "generate": generate, "continuous": continuous}
    clock = time.process_time if args.processor_time else time.perf_counter
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(args.rounds):
        for name, run in engines.items():
            speeds[name].append(measure(run, clock))
            print(f"  {name} {speeds[name][-1]:.0f}", flush=True)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    best = max(medians["generate"], medians["continuous"])
    print(f"{args.model}, {len(work.prompts)} prompts, {work.num_tokens} tokens, {device}, {args.threads} threads")
    for name, value in medians.items():
        rounds = " ".join(f"{speed:.0f}" for speed in speeds[name])
        print(f"  {name:10s} {value:9.1f} tokens/s   (rounds: {rounds})")
    print(f"  sampler is {medians['sampler'] / best:.2f}x the better of the other two")
    if args.out:
        with open(args.out, "w") as file:
            json.dump({"args": vars(args), "tokens_per_second": speeds}, file, indent=1)


if __name__ == "__main__":
    with torch.no_grad():
        main()
