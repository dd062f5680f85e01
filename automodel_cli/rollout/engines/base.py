"""Protocol of generation engines: prompts in, tokens with log-probs out, replaceable weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from automodel_cli.config.errors import RunError
from automodel_cli.rollout.types import Completion, CudaGraphs, SamplingParams, WeightStream

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from automodel_cli.rollout.http import Server

Joins = Callable[[Iterator[Sequence[tuple[str, "Tensor"]]]], None]
"""Consumer of the weight stream on a rank without a connection to a server."""


@dataclass(frozen=True)
class Capabilities:
    """Features of an engine, which recipes check before the first rollout.

    - `logprobs`: log-probs of the sampled distribution.
    - `token_ids`: exact ids of prompt and completion. Without, completions are tokenized again, which suffices for
      evaluation but not for training.
    - `weight_updates`: `update_weights` is supported.
    - `seeds`: a sample depends only on its own seed, not on the other prompts of the call.
    - `live_weights`: generates with the trained parameters themselves, so it cannot generate during an update.
    - `at_once`: maximum number of concurrent calls of `generate`.
    - `in_flight_updates`: `update_weights` may run during `generate`. Completions contain the weight version of each
      token.
    - `routing`: returns the routed experts of each token.
    - `hub_names`: the weight stream must use tensor names of hub checkpoints, not parameter names.
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
    """Generator of completions. Recipes use only this interface."""

    capabilities: Capabilities
    weight_version: int

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """Return one completion per prompt, in the order of the prompts. Prompts are token ids and not empty.

        `seeds` has one seed per prompt (`sample_seed`), which makes a sample independent of batch and rank. None
        derives seeds from `params.seed` and the position in the call. Ranks of the same pipeline-, tensor- or
        context-parallel group must pass the same call.
        """

    def update_weights(self, stream: WeightStream) -> None:
        """Replace all weights, then increment `weight_version`. Consumes the stream once and keeps no tensor of it.

        An engine with `live_weights` only increments the version and leaves the stream untouched on every rank.
        """


class EngineContext(Protocol):
    """Inputs to build an engine: one rank of a run, and the engines that the run has started."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
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
        """Whether servers generate on the GPUs that train, alternating with training
        (`rollout.placement=colocated`)."""
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

    def replica(self, **options: object) -> Engine:
        """Return a copy of the model on this rank, which has no weights yet. `options` are arguments of `HFEngine`."""
        ...

    def on_first_rank(self, make: Callable[[], Engine], *, joins: Joins | None = None) -> Engine:
        """Return the engine that `make` builds on rank 0, shared by all ranks. `joins` is called with new weights on
        the other ranks. Collective."""
        ...

    def start_server(self, command: Sequence[str], server: Server, *, timeout: float) -> None:
        """Run `command` until the run ends. Return once `server` responds. Raise RunError after `timeout` seconds."""
        ...

    def start_servers(self, *, timeout: float) -> list[str]:
        """Start the servers of `rollout.engine.servers` and return their addresses once all respond. They end with the
        run. Collective. Raise RunError after `timeout` seconds."""
        ...


class EngineConfig(Protocol):
    """Interface of the `rollout.engine` node, a frozen dataclass. Example of a custom engine:
    examples/own_engine.py."""

    @property
    def capabilities(self) -> Capabilities:
        """Features that the engine can have at best. Known without building it, for `automodel check`."""
        ...

    def build(self, host: EngineContext) -> Engine:
        """The engine of this rank. Collective: all ranks build theirs together."""
        ...


def sample_seed(seed: int, *path: int) -> int:
    """Return the seed of one sample: a 63-bit hash of the seed of the run and the position (step, prompt, sample)."""
    digest = hashlib.blake2b(json.dumps([seed, *path]).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def resolve_seeds(prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None) -> list[int]:
    """Return one seed per prompt: the given seeds, else derived from `params.seed`, else from torch's random state.

    Raises RunError for an empty prompt, and if the numbers of prompts and seeds differ.
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
