"""A model under evaluation, built with its training layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.pictures.reader import PictureSupport
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.rollout.config import RolloutConfig
from automodel_cli.rollout.engines.base import Engine
from automodel_cli.rollout.engines.context import EngineHost
from automodel_cli.rollout.engines.decoding_check import check_decoding
from automodel_cli.rollout.engines.policy_engine import check_lengths
from automodel_cli.rollout.environments.pool import EnvironmentPool
from automodel_cli.run.model_builder import Model
from automodel_cli.run.picture_data import picture_support
from automodel_cli.run.recipe import Recipe
from automodel_cli.run.trainer import Trainer
from automodel_cli.training.checkpoint.checkpointer import Checkpointer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")


@dataclass
class EvalModel:
    """A model with its tokenizer on this rank, as tasks see it. Every rank has one."""

    label: str
    recipe: Recipe
    mesh: Mesh
    model: Model
    tokenizer: PreTrainedTokenizerBase
    run_dir: Path
    at_exit: ExitStack = field(default_factory=ExitStack)
    taught_stops: Sequence[int] = ()
    _read: dict[int, Any] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        label: str,
        recipe: Recipe,
        mesh: Mesh,
        tokenizer: PreTrainedTokenizerBase,
        run_dir: Path,
        checkpoint: Path | None,
    ) -> EvalModel:
        """The model as the recipe begins with it, or with the weights of a checkpoint. Collective."""
        model = Model.build(recipe, mesh)
        taught: Sequence[int] = ()
        if checkpoint is not None:
            loaded = Checkpointer(run_dir, recipe.checkpoint).load(checkpoint, model.parts)
            taught = loaded.extra.get("taught_stops", ())
        return cls(label, recipe, mesh, model, tokenizer, run_dir, taught_stops=taught)

    @classmethod
    def of_session(cls, session: Trainer) -> EvalModel:
        """Return the model of a running training, with its current weights."""
        s = session
        return cls("", s.recipe, s.mesh, s.model, s.tokenizer, s.run_dir, s.at_exit, s.taught_stops)

    @property
    def is_main(self) -> bool:
        return dist.get_rank() == 0

    @cached_property
    def sampler(self) -> Engine:
        """The sampler on these weights. Collective. Raises ConfigError for a family that it cannot decode."""
        config, model = self.model.parts[0].source_config, self.recipe.model
        try:
            check_lengths(config, self.recipe.data.seq_len)
            check_decoding(config, attention=model.attn_implementation, trust_remote_code=model.trust_remote_code)
        except ConfigError as error:
            raise ConfigError(
                f"{error.message}; multiple-choice tasks need no sampler", code=error.code, keys=error.keys
            ) from error
        return EngineHost(self).sampler(max_num_seqs=None, max_num_batched_tokens=8192, refill_threshold=0.125)

    @cached_property
    def pictures(self) -> PictureSupport | None:
        """What reads the pictures of questions, None if the model reads text only. Raises ConfigError."""
        if self.recipe.model.vision is None:
            return None
        return picture_support(self.recipe.model, self.recipe.data, self.tokenizer)

    @property
    def plays(self) -> RolloutConfig | None:
        """The rollout config, if the run's questions start conversations with environments."""
        config = getattr(self.recipe, "rollout", None)
        return config if isinstance(config, RolloutConfig) and config.played else None

    @cached_property
    def pool(self) -> EnvironmentPool | None:
        """Environments of such conversations. The pool is closed with this model."""
        config = self.plays
        if config is None:
            return None
        for environment in config.played.values():
            environment.check()
        pool = EnvironmentPool(config.played, config.environment_column if config.environments else None)
        self.at_exit.callback(pool.close)
        return pool

    def once(self, task: object, read: Callable[[], T]) -> T:
        """Return the cached result of `read` for the task: its questions as tokens of this model."""
        if id(task) not in self._read:
            self._read[id(task)] = read()
        result: T = self._read[id(task)]
        return result

    def share(self, number: int) -> list[int]:
        """Return the indices of this rank's questions among `number`. Ranks of one model-parallel group get the
        same."""
        return list(range(number))[self.mesh.dp_rank :: self.mesh.dp_size]

    def gathered(self, mine: dict[int, Any]) -> list[Any]:
        """Return the values of all ranks in the order of the questions. Collective."""
        everywhere: list[dict[int, Any]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, mine)
        merged = {number: value for of_rank in everywhere for number, value in of_rank.items()}
        return [merged[number] for number in sorted(merged)]
