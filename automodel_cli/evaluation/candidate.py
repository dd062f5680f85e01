"""One model that is judged, built as for training under its own layout."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch.distributed as dist

from automodel_cli.distributed.mesh import Mesh
from automodel_cli.rollout.engine import Engine
from automodel_cli.rollout.engine_host import EngineHost
from automodel_cli.run.model import Model
from automodel_cli.run.recipe import Recipe
from automodel_cli.training.checkpoint import Checkpointer


@dataclass
class Candidate:
    """A model with its tokenizer on this rank, as tasks see it. Every rank has one."""

    label: str
    recipe: Recipe
    mesh: Mesh
    model: Model
    tokenizer: Any
    run_dir: Path
    at_exit: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def build(
        cls, label: str, recipe: Recipe, mesh: Mesh, tokenizer: Any, run_dir: Path, checkpoint: Path | None
    ) -> Candidate:
        """The model as the recipe begins with it, or with the weights of a checkpoint. Collective."""
        model = Model.build(recipe, mesh)
        if checkpoint is not None:
            Checkpointer(run_dir, recipe.checkpoint).load(checkpoint, model.parts)
        return cls(label, recipe, mesh, model, tokenizer, run_dir)

    @property
    def is_main(self) -> bool:
        return dist.get_rank() == 0

    @cached_property
    def sampler(self) -> Engine:
        """The sampler on these weights. Collective. Raises ConfigError for a family that it cannot decode."""
        return EngineHost(self).sampler(num_slots=None, prefill_tokens=8192, refill_share=0.125)

    def share(self, number: int) -> list[int]:
        """Which of `number` questions this rank asks: ranks that share rows ask the same."""
        return list(range(number))[self.mesh.dp_rank :: self.mesh.dp_size]

    def gathered(self, mine: dict[int, Any]) -> list[Any]:
        """What all ranks found, by the number of the question. Collective."""
        everywhere: list[dict[int, Any]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everywhere, mine)
        found = {number: value for of_rank in everywhere for number, value in of_rank.items()}
        return [found[number] for number in sorted(found)]
