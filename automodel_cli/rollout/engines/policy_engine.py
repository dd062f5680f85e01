"""Engines on the model of a run, and checks that a model family is supported by them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.attention.packed import packed_attention
from automodel_cli.models.document_masking import dynamic_rope
from automodel_cli.models.hub.source import stop_ids
from automodel_cli.models.model_part import model_parts
from automodel_cli.pipelining.torch_runtime.fsdp_compat import reshards_after_forward
from automodel_cli.rollout.engines.base import Capabilities, Engine, Joins, resolve_seeds
from automodel_cli.rollout.engines.sampler.decoder import Decoder, DecoderStage, fsdp_gathered
from automodel_cli.rollout.engines.sampler.sampler import Sampler
from automodel_cli.rollout.engines.transformers_engine import HFEngine
from automodel_cli.rollout.types import Completion, SamplingParams, WeightStream
from automodel_cli.run.checks.token_ids import pad_id

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from automodel_cli.distributed.mesh import Mesh
    from automodel_cli.rollout.run_context import RunContext
    from automodel_cli.training.stages import Stages


def build_replica(session: RunContext, stops: list[int], **options: Any) -> HFEngine:
    """The library's own generation on a copy of the model, whose weights must come by `update_weights`. `stops` are the
    tokens that end a response, `options` the engine's own.
    """
    tokenizer, part = session.tokenizer, session.model.parts[0]
    model = part.model
    return HFEngine.from_config(
        part.untied(model.config),
        device=session.mesh.device,
        dtype=model.dtype,
        trust_remote_code=session.recipe.model.trust_remote_code,
        stop_token_ids=stops,
        pad_token_id=pad_id(tokenizer, model.config.get_text_config().vocab_size),
        **options,
    )


def stop_token_ids(built: RunContext) -> list[int]:
    """Return the tokens that end a response: from the tokenizer, the configs and the training data."""
    listed = built.model.parts[0].model.config.get_text_config().eos_token_id
    more = listed if isinstance(listed, list) else [listed]
    ids = (built.tokenizer.eos_token_id, *more, *stop_ids(built.recipe.model), *built.taught_stops)
    return list(dict.fromkeys(i for i in ids if i is not None))


T = TypeVar("T")


class Start(Protocol):
    """Start a call. The returned function waits for it and returns its result or raises its exception."""

    def __call__(self, call: Callable[[], T], /) -> Callable[[], T]: ...


def at_once(call: Callable[[], T]) -> Callable[[], T]:
    """`Start` without a thread: the call runs when the result is requested."""
    return call


class RankZeroEngine:
    """Engine that only rank 0 talks to, shared by all ranks. The other ranks pass None. With `shares_gpus` it
    alternates with training on the same GPUs, and `rest` hands them back."""

    def __init__(self, engine: Engine | None, *, shares_gpus: bool = False, joins: Joins | None = None):
        self._engine, self._shares_gpus, self._joins = engine, shares_gpus, joins
        about: list[Any] = [None if engine is None else engine.capabilities]
        dist.broadcast_object_list(about, src=0, device=torch.device("cpu"))
        self.capabilities: Capabilities = about[0]
        self.weight_version = 0
        self.metrics: dict[str, float] = {}
        """Metrics of the engine as of the last answers, if it has `metrics`."""

    @property
    def answers_here(self) -> bool:
        """Whether this rank is connected to the engine."""
        return self._engine is not None

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """See `Engine.generate`. Collective over all ranks. Ranks that share prompts must pass the same `seeds`: each
        (prompt, seed) is sent once."""
        return self.begin(prompts, params, seeds, at_once)()

    def begin(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int] | None, start: Start
    ) -> Callable[[], list[Completion]]:
        """Start `generate` and return a function that waits for the answers. Both calls are collective. `start`
        receives the call on rank 0 and may run it in a thread."""
        self._make_room()
        seeds = resolve_seeds(prompts, params, seeds)
        requests = list(zip(map(tuple, prompts), seeds, strict=True))
        everywhere: list[list[tuple[tuple[int, ...], int]]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, requests)
        unique = list(dict.fromkeys(pair for of_rank in everywhere for pair in of_rank))
        drawing = start(lambda: self._generate_here(unique, params)) if self.answers_here else None

        def finish() -> list[Completion]:
            done = self._for_all(None if drawing is None else lambda: self._counted(drawing()))
            results = dict(zip(unique, done, strict=True))
            return [results[pair] for pair in requests]

        return finish

    def idle_fraction(self) -> float | None:
        """Return the share of the time since the last call in which the servers had no requests. None on other ranks,
        and if the engine does not measure it."""
        fraction = getattr(self._engine, "idle_fraction", None)
        return None if fraction is None else fraction()

    def at_once(self) -> int:
        """How many calls of the engine may run at once."""
        return self.capabilities.at_once

    def begin_for_all(
        self,
        mine: list[T],
        call: Callable[[Engine, list[T]], None],
        start: Start,
        counted: Callable[[list[T], int], None],
    ) -> Callable[[], list[T]]:
        """Gather the arguments of all ranks, run `call` on rank 0, and return a function that waits and scatters the
        results.

        Both calls are collective, as in `begin`. `counted` receives all results at the end, and by how many updates
        the engine is behind the run.
        """
        self._make_room()
        everywhere: list[list[T]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, mine)
        engine, together = self._engine, [item for of_rank in everywhere for item in of_rank]
        calling = None if engine is None else start(partial(call, engine, together))

        def called() -> list[list[T]]:
            assert engine is not None and calling is not None
            calling()
            counted(together, self.weight_version - engine.weight_version)
            return everywhere

        def finish() -> list[T]:
            results: list[list[T]] = self._for_all(None if engine is None else called)
            return results[dist.get_rank()]

        return finish

    def _generate_here(self, asked: Sequence[tuple[tuple[int, ...], int]], params: SamplingParams) -> list[Completion]:
        """On the rank that speaks to the engine, in whichever thread."""
        assert self._engine is not None
        version = self.weight_version
        completions = self._engine.generate([list(p) for p, _ in asked], params, [seed for _, seed in asked])
        if self.capabilities.in_flight_updates:
            return completions
        return [dataclasses.replace(completion, weight_version=version) for completion in completions]

    def _counted(self, found: list[Completion]) -> list[Completion]:
        """Convert the versions of an engine that counts its own updates to those of the run."""
        assert self._engine is not None
        if not self.capabilities.in_flight_updates:
            return found
        behind = self.weight_version - self._engine.weight_version
        return [
            dataclasses.replace(
                completion,
                weight_version=completion.weight_version + behind,
                token_versions=completion.token_versions and [v + behind for v in completion.token_versions],
            )
            for completion in found
        ]

    def _for_all(self, drawing: Callable[[], list[T]] | None) -> list[T]:
        """Return the result of the first rank's `drawing` on every rank. Collective."""
        outcome: list[tuple[list[T], dict[str, float]] | ConfigError] = [([], {})]
        if drawing is not None:
            try:
                outcome = [(drawing(), getattr(self._engine, "metrics", {}))]
            except ConfigError as error:  # from the server: raise it on every rank
                outcome = [error]
        dist.broadcast_object_list(outcome, src=0, device=torch.device("cpu"))
        if isinstance(outcome[0], ConfigError):
            raise outcome[0]
        results, self.metrics = outcome[0]
        return results

    def update_weights(self, stream: WeightStream) -> None:
        """See `Engine.update_weights`. Collective: every rank takes part in the stream."""
        self._make_room()
        if self._shares_gpus:
            dist.barrier()
        if self._engine is not None:
            self._engine.update_weights(stream)
        elif self._joins is not None:
            self._joins(iter(stream))
        else:
            for _ in stream:
                pass
        self.weight_version += 1

    def rest(self, *, weights_follow: bool) -> None:
        """Hand the GPUs to the ranks until the next call. With `weights_follow` new weights arrive before it. No
        effect for an engine with separate GPUs. Collective."""
        if not self._shares_gpus:
            return
        failed: list[ConfigError | None] = [None]
        if self._engine is not None:
            try:
                self._engine.rest(weights_follow=weights_follow)  # type: ignore[attr-defined]
            except ConfigError as error:
                failed[0] = error
        dist.broadcast_object_list(failed, src=0, device=torch.device("cpu"))
        if failed[0] is not None:
            raise failed[0]

    def _make_room(self) -> None:
        """Free this rank's allocator cache, because the engine's processes cannot use it."""
        if self._shares_gpus and torch.cuda.is_available():
            torch.cuda.empty_cache()


def build_sampler(
    stages: Stages, mesh: Mesh, *, stop_token_ids: list[int], trust_remote_code: bool = False, **options: Any
) -> Sampler:
    """Return a `Sampler` on the live weights of `stages`, for any layout. Ranks of one pipeline-, tensor- or
    context-parallel group must pass the same prompts. Data-parallel ranks pass different prompts, in any number.
    Collective over the pipeline."""
    decoder = build_decoder(stages, mesh, trust_remote_code=trust_remote_code)
    return Sampler(decoder, packed_attention, stop_token_ids=stop_token_ids, **options)


def build_decoder(stages: Stages, mesh: Mesh, *, trust_remote_code: bool = False) -> Decoder:
    """See `build_sampler`."""
    parts = model_parts(stages.parts)
    sharded = any(isinstance(module, FSDPModule) for part in parts for module in part.modules())
    local_parts, rank = iter(parts), mesh.pp.get_local_rank()
    return Decoder(
        [DecoderStage(owner, next(local_parts) if owner == rank else None) for owner in stages.stage_owners],
        mesh.device,
        pp_group=stages.pp_group,
        hidden_dtype=stages.boundary_dtype,
        trust_remote_code=trust_remote_code,
        gathered=fsdp_gathered(parts, reshards_after_forward) if sharded else None,
        lockstep_group=mesh.ep.get_group() if mesh.ep is not None else None,
    )


def check_lengths(hf_config: PretrainedConfig, longest: int) -> None:
    """Raise ConfigError if sequences of up to `longest` tokens change their rotary table during generation.

    Such tokens are sampled with the table of the shorter text but trained with the table of the complete text. Their
    log-probs would belong to another policy, with any engine.
    """
    limit = dynamic_rope.longest_unswitched(hf_config)
    if limit is not None and longest > limit:
        raise ConfigError(
            f"data.seq_len={longest} is longer than the {limit} tokens at which {hf_config.model_type} changes its "
            "rotary table. Earlier tokens would be sampled with "
            "one table and trained with another",
            code="sequence_length",
            keys=("data.seq_len", "rollout"),
            fix=f"data.seq_len={limit}",
        )
