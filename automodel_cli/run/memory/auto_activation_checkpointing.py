"""Resolve `activation_checkpointing=auto` once, before the model is built, equally on all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from automodel_cli.distributed.compile_modes import AUTO
from automodel_cli.distributed.mesh_config import Layout
from automodel_cli.distributed.strategies.base import ParallelizerConfig
from automodel_cli.run.plan_request import plan_request

if TYPE_CHECKING:
    from automodel_cli.distributed.mesh import Mesh
    from automodel_cli.planning.activation_checkpointing import CheckpointingChoice
    from automodel_cli.run.recipe import Recipe


def is_open(recipe: Recipe) -> bool:
    """Return whether the config sets `auto`."""
    return recipe.parallelizer.activation_checkpointing == AUTO


def decide(recipe: Recipe, layout: Layout, memory: float | None) -> CheckpointingChoice:
    """Choose for GPUs with `memory` bytes. None: CPU."""
    from automodel_cli.planning.activation_checkpointing import CheckpointingChoice, choose_activation_checkpointing

    if memory is None:
        return CheckpointingChoice(False, refused="memory is not the limit on a CPU")
    if recipe.extra_memory_user is not None:
        return CheckpointingChoice("full", refused=f"no estimate of {recipe.extra_memory_user}")
    return choose_activation_checkpointing(plan_request(recipe, layout), memory)


def with_choice(recipe: Recipe, choice: CheckpointingChoice) -> Recipe:
    assert isinstance(recipe.parallelizer, ParallelizerConfig)
    parallelizer: Any = replace(recipe.parallelizer, activation_checkpointing=choice.mode)
    if choice.keeps_experts:
        parallelizer = parallelizer.keeping_experts()
    return replace(recipe, parallelizer=parallelizer)


def decided(recipe: Recipe, layout: Layout, memory: float | None) -> tuple[Recipe, str | None]:
    """Return the recipe with a mode in place of `auto`, and a sentence with the numbers. Without `auto`: None."""
    if not is_open(recipe):
        return recipe, None
    choice = decide(recipe, layout, memory)
    return with_choice(recipe, choice), str(choice)


def decided_together(recipe: Recipe, mesh: Mesh) -> tuple[Recipe, str | None]:
    """Return the same for all ranks: rank 0 decides for the smallest GPU. Collective."""
    if not is_open(recipe):
        return recipe, None
    import torch
    import torch.distributed as dist

    from automodel_cli.planning.activation_checkpointing import CheckpointingChoice
    from automodel_cli.training.metrics.peak_memory import max_over_ranks

    memory = None
    if mesh.device.type == "cuda":
        memory = -max_over_ranks(-float(torch.cuda.get_device_properties(mesh.device).total_memory), mesh.device)
    decision = [decide(recipe, mesh.layout, memory) if dist.get_rank() == 0 else CheckpointingChoice("full")]
    dist.broadcast_object_list(decision, src=0, device=torch.device("cpu"))
    return with_choice(recipe, decision[0]), str(decision[0])
