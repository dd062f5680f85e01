"""Services that a run offers to its engine: the model (sharded or copied), ranks, servers and cleanup."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from automodel_cli.models.moe.router_hooks import mark_selections
from automodel_cli.rollout.engines.base import Engine, Joins
from automodel_cli.rollout.engines.policy_engine import RankZeroEngine, build_replica, build_sampler, stop_token_ids
from automodel_cli.rollout.engines.sampler.capacity import max_num_seqs as slots_for
from automodel_cli.rollout.engines.sampler.cuda_graphs import settled
from automodel_cli.rollout.engines.servers.server_launcher import start_servers
from automodel_cli.rollout.engines.servers.server_process import ServerProcess
from automodel_cli.rollout.engines.transformers_engine import HFEngine
from automodel_cli.rollout.run_context import RunContext
from automodel_cli.rollout.types import CudaGraphs

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from automodel_cli.models.moe.router_hooks import Selectors
    from automodel_cli.rollout.http import Server


class EngineHost:
    """Implementation of `EngineContext`. The recipe has already checked that the model can be generated with.
    `selectors` are the router modules, if routed experts are recorded."""

    def __init__(self, session: RunContext, *, shares_gpus: bool = False, selectors: Selectors | None = None):
        self.shares_gpus, self._selectors = shares_gpus, selectors
        self._session, self.tokenizer = session, session.tokenizer
        self._source_config = session.model.parts[0].source_config
        self.stop_token_ids = stop_token_ids(session)

    @property
    def num_layers(self) -> int:
        """See `EngineContext`."""
        return int(self._source_config.get_text_config().num_hidden_layers)

    @property
    def device(self) -> torch.device:
        return self._session.mesh.device

    @property
    def run_dir(self) -> Path:
        return self._session.run_dir

    def sampler(
        self,
        *,
        max_num_seqs: int | None,
        max_num_batched_tokens: int,
        refill_threshold: float,
        cuda_graphs: CudaGraphs = "auto",
    ) -> Engine:
        """See `EngineContext`."""
        recipe, mesh, stages = self._session.recipe, self._session.mesh, self._session.model.stages
        config, trust = self._source_config, recipe.model.trust_remote_code
        build = partial(build_sampler, stages, mesh, stop_token_ids=self.stop_token_ids, trust_remote_code=trust)
        if max_num_seqs is None:
            state_bytes = build(max_num_seqs=1).state_bytes()
            max_num_seqs = slots_for(config, recipe.data.seq_len, mesh, state_bytes)
        capture, steps = settled(cuda_graphs, stages.parts, mesh)
        engine = build(
            capture=capture,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            refill_threshold=refill_threshold,
        )
        engine.about = f"{max_num_seqs} slots   {steps}"
        return engine

    def replica(self, **options: object) -> HFEngine:
        """See `EngineContext`."""
        engine = build_replica(self._session, self.stop_token_ids, **options)
        if self._selectors is not None:
            mark_selections(engine.model, self._selectors)
        return engine

    def on_first_rank(self, make: Callable[[], Engine], *, joins: Joins | None = None) -> Engine:
        """See `EngineContext`."""
        return RankZeroEngine(make() if self._session.is_main else None, shares_gpus=self.shares_gpus, joins=joins)

    def start_server(self, command: Sequence[str], server: Server, *, timeout: float) -> None:
        """See `EngineContext`. Its output goes to `logs/rollout_server.log` of the run."""
        log = self._session.run_dir / "logs" / "rollout_server.log"
        process = ServerProcess(command, server, log, timeout=timeout)
        self._session.at_exit.callback(process.close)

    def start_servers(self, *, timeout: float) -> list[str]:
        """See `EngineContext`. Their output goes to `logs/rollout_server-N.log` of the run."""
        servers = self._session.recipe.generation_servers()
        assert servers is not None
        return start_servers(servers, self._session.run_dir / "logs", self._session.at_exit, timeout=timeout)
