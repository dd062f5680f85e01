"""What a generation engine is: prompts in, tokens with log-probs out, weights replaceable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from automodel_cli.config.errors import RunError
from automodel_cli.rollout.types import Completion, CudaGraphs, SamplingParams, WeightStream

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

    from automodel_cli.rollout.http import Server

Joins = Callable[[Iterator[Sequence[tuple[str, "Tensor"]]]], None]
"""What a rank that does not speak to a server does with the stream of new weights."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine can do, so that a recipe refuses at the start what would fail at the first rollout.

    `logprobs`: those of the distribution sampled from. `token_ids`: the very ids that the model read and wrote; without
    them a completion's tokens are its text tokenised again, fit for evaluation, not for training. `weight_updates`:
    `update_weights` works. `seeds`: a sample depends on its own seed alone, not on what else is in the call.
    `live_weights`: it reads the very weights that are trained, so it cannot generate while they are updated.
    `at_once`: how many calls of `generate` may run at once in threads; 1: none beside another.
    `in_flight_updates`: `generate` may be called from several threads, and `update_weights` while they generate; each
    completion tells by which weights it was drawn.
    `routing`: it tells of each token which experts it went to.
    `hub_names`: the weight stream must name tensors as checkpoints on the hub do, not as the model's parameters.
    """

    logprobs: bool
    weight_updates: bool
    token_ids: bool = True
    seeds: bool = True
    live_weights: bool = False
    hub_names: bool = False
    at_once: int = 1
    in_flight_updates: bool = False
    routing: bool = False


class Engine(Protocol):
    """One generator of completions. Engines share nothing else, and recipes know only this."""

    capabilities: Capabilities
    weight_version: int

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """One completion for each prompt (token ids, not empty), in the order of the prompts.

        `seeds`, one for each prompt (`sample_seed`), make a sample the same whatever else is in the call, on whichever
        rank and in whichever batch it is drawn; None derives them from `params.seed` and the place in the call. Ranks
        that share a pipeline, a tensor-parallel or a context-parallel group must pass the same call.
        """

    def update_weights(self, stream: WeightStream) -> None:
        """Replace every weight, then count the version up. The stream is consumed once; nothing of it is kept.

        An engine that reads the trained weights themselves only counts: it leaves the stream untouched on every rank.
        """


class EngineContext(Protocol):
    """What an engine is built for: one rank of a run, and the engines that the run has ready."""

    @property
    def tokenizer(self) -> Any: ...
    @property
    def stop_token_ids(self) -> list[int]:
        """The tokens that end a response."""
        ...

    @property
    def num_layers(self) -> int:
        """Of the model, as its config counts them."""
        ...

    @property
    def device(self) -> torch.device: ...
    @property
    def run_dir(self) -> Path:
        """The run's folder, the same on all ranks."""
        ...

    @property
    def shares_gpus(self) -> bool:
        """Whether servers generate on the GPUs that train, in turns (`rollout.placement=colocated`)."""
        ...

    def sampler(
        self,
        *,
        max_num_seqs: int | None,
        max_num_batched_tokens: int,
        refill_threshold: float,
        cuda_graphs: CudaGraphs = "auto",
    ) -> Engine:
        """Our own sampler on the weights as they are trained, under any layout. Collective."""
        ...

    def replica(self, **options: Any) -> Engine:
        """A copy of the model on this rank, that waits for its weights; `options` are those of `HFEngine`."""
        ...

    def on_first_rank(self, make: Callable[[], Engine], *, joins: Joins | None = None) -> Engine:
        """The engine that `make` gives on rank 0, shared by all ranks. `joins` is what the other ranks do with new
        weights; None: nothing. Collective."""
        ...

    def start_server(self, command: Sequence[str], server: Server, *, timeout: float) -> None:
        """Run `command` until the run ends; returns once `server` answers, raises RunError after `timeout` seconds."""
        ...

    def start_servers(self, *, timeout: float) -> list[str]:
        """The addresses of the servers that the recipe's `rollout.engine.servers` asks for, once all answer; they end
        with the run. Collective. Raises RunError after `timeout` seconds."""
        ...


class EngineConfig(Protocol):
    """What recipes ask of the `rollout.engine` node, a frozen dataclass. Your own: examples/own_engine.py."""

    @property
    def capabilities(self) -> Capabilities:
        """What its engines can do at best; known without building one, so that `automodel check` refuses the rest."""
        ...

    def build(self, host: EngineContext) -> Engine:
        """The engine of this rank. Collective: all ranks build theirs together."""
        ...


def sample_seed(seed: int, *path: int) -> int:
    """The seed of one sample: a 63-bit hash of the run's seed and where the sample is (step, prompt, sample)."""
    digest = hashlib.blake2b(json.dumps([seed, *path]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def resolve_seeds(prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None) -> list[int]:
    """One seed for each prompt: those given, else from `params.seed`, else from the caller's torch random state.

    Raises RunError for an empty prompt, and where the numbers of prompts and seeds differ.
    """
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise RunError(f"prompt {i} of {len(prompts)} has no tokens", code="empty_value", keys=("prompts",))
    if seeds is not None:
        if len(seeds) != len(prompts):
            raise RunError(
                f"the number of prompts ({len(prompts)}) differs from the number of seeds ({len(seeds)})",
                code="batch_shape",
                keys=("seeds",),
            )
        return list(seeds)
    if params.seed is None and not params.greedy:
        import torch

        base = int(torch.randint(2**62, ()))
    else:
        base = params.seed or 0
    return [sample_seed(base, i) for i in range(len(prompts))]
