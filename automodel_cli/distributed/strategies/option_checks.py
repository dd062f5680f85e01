"""Checks that the config nodes of strategies share. Torch-free at import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_choice
from automodel_cli.distributed.mesh_config import MeshConfig

if TYPE_CHECKING:
    import torch


DTYPES = ("float32", "bfloat16", "float16")


def torch_dtype(name: str | None) -> torch.dtype | None:
    """Return torch.bfloat16 for "bfloat16". None stays None."""
    import torch

    dtype: torch.dtype | None = None if name is None else getattr(torch, name)
    return dtype


def check_dtype(name: str, value: object, path: str) -> None:
    if value is not None:
        check_choice(name, value, DTYPES, fix=f"{path}={DTYPES[0]}")


def refuse_axes(strategy: str, mesh: MeshConfig, axes: dict[str, str]) -> None:
    for name, kind in axes.items():
        size = getattr(mesh, name) or 1
        if size > 1:
            raise ConfigError(
                f"mesh.{name}={size} is not supported because parallelizer={strategy} has no {kind} parallelism",
                code="unsupported_combination",
                keys=(f"mesh.{name}",),
                fix=f"mesh.{name}=1",
            )


def check_tp_plan(plan: object) -> None:
    """Raise ConfigError unless `plan` is an import path, a function, or a mapping of module names to styles."""
    fix = "parallelizer.tp_plan=null"
    if plan is None or callable(plan) or (isinstance(plan, str) and plan):
        return
    if not isinstance(plan, Mapping) or not plan:
        message = f"tp_plan={plan!r} must be an import path or a mapping of module names to styles"
        raise ConfigError(message, code="wrong_type", keys=("tp_plan",), fix=fix)
    for name, style in plan.items():
        if style is None or isinstance(style, (bool, int, float, list, dict)):
            raise ConfigError(
                f"tp_plan[{name!r}]={style!r} must be the name of a style, for example colwise",
                code="wrong_type",
                keys=("tp_plan",),
                fix=fix,
            )


def refuse_idle_tp_options(config: object, names: Sequence[str], mesh: MeshConfig) -> None:
    """Raise ConfigError for options of tensor parallelism on a mesh without it."""
    for name in names:
        if getattr(config, name) and (mesh.tp_size or 1) == 1:
            off = "null" if name == "tp_plan" else "false"
            raise ConfigError(
                f"{name} needs tensor parallelism, but mesh.tp_size={mesh.tp_size or 1}",
                code="requires_setting",
                keys=(f"parallelizer.{name}", "mesh.tp_size"),
                fix=f"parallelizer.{name}={off}",
            )
