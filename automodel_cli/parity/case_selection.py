"""Cases that verify a recipe: everything its sections use, separately and together, with two ranks per axis.

Torch-free, so that cases can be listed and filtered quickly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.strategies.base import Strategy
from automodel_cli.objectives.base import Objective
from automodel_cli.parity.cases import Case
from automodel_cli.pipelining.config import PipelineConfig

MAX_RANKS = 8
_ATTENTIONS = ("packed", "sdpa", "eager")


def choose_cases(
    wanted: MeshConfig, parallelizer: Strategy, pipeline: PipelineConfig | None, objective: Objective
) -> list[Case]:
    """Return cases for one rank, each axis alone, and the largest combinations on 8 ranks, on packed and padded rows.

    `dp_size: null` counts as data parallelism, because a run uses all available ranks. Expert parallelism shares ranks
    with other axes, so `ep` alone includes data parallelism.
    """
    used = _used(wanted)
    stages = small_pipeline(pipeline)
    sets = [(), *((axis,) for axis in used), *_largest_together(used)]
    rows = []
    for mesh, axes in {_mesh(axes): axes for axes in sets}.items():  # ep alone can equal dp with ep
        row = Case(mesh, parallelizer.exact(axes), stages if "pp" in axes else None, objective=objective)
        rows += [row, replace(row, packed=False)]
    return rows


def _used(mesh: MeshConfig) -> list[str]:
    sizes = {"pp": mesh.pp_size, "tp": mesh.tp_size, "cp": mesh.cp_size, "hsdp": mesh.dp_replicate_size}
    used = [axis for axis, size in sizes.items() if (size or 1) > 1]
    if "hsdp" not in used and mesh.dp_size != 1:
        used.append("dp")
    return [*used, "ep"] if (mesh.ep_size or 1) > 1 else used


def _largest_together(used: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the maximal sets of axes that fit."""
    fitting = [
        axes for count in range(len(used), 0, -1) for axes in combinations(used, count) if _num_ranks(axes) <= MAX_RANKS
    ]
    for axes in fitting:
        if not any(set(axes) < set(larger) for larger in fitting):
            yield axes


def _num_ranks(axes: Sequence[str]) -> int:
    return (_mesh(axes).dp_size or 1) * _mesh(axes).ranks_per_replica


def _mesh(axes: Sequence[str]) -> MeshConfig:
    """Return a mesh with two ranks per axis. HSDP needs four data-parallel ranks, experts two ranks per stage."""
    others = {"dp", "hsdp", "cp", "tp"} & set(axes)
    dp_size = 4 if "hsdp" in axes else 2 if "dp" in axes or ("ep" in axes and not others) else 1
    sizes = {f"{axis}_size": 2 for axis in ("pp", "tp", "cp", "ep") if axis in axes}
    return MeshConfig(dp_size=dp_size, dp_replicate_size=2 if "hsdp" in axes else 1, **sizes)


def small_pipeline(config: PipelineConfig | None) -> PipelineConfig | None:
    """Return the same schedule without the stage split, which refers to layers that the tiny copy does not have."""
    if config is None:
        return None
    return PipelineConfig(schedule=config.schedule or "1f1b", balance=config.balance)


def small_attention(attention: str) -> str:
    """Replace CUDA-only attention by packed attention."""
    return attention if attention in _ATTENTIONS else "packed"


def pick(rows: Sequence[Case], wanted: Sequence[str]) -> list[Case]:
    """Return the cases that match all words of an entry ("pp2 packed"). Raises ConfigError if an entry matches none."""
    chosen: list[Case] = []
    for words in wanted:
        matches = [row for row in rows if set(words.replace(",", " ").split()) <= _name_parts(row)]
        if not matches:
            raise ConfigError(
                f"--rows {words!r} matches no case of this recipe",
                code="unknown_name",
                keys=("--rows",),
                fix="one of: " + "; ".join(map(str, rows)),
            )
        chosen += [row for row in matches if row not in chosen]
    return [row for row in rows if row in chosen] if wanted else list(rows)


def _name_parts(row: Case) -> set[str]:
    return set(str(row).replace(",", " ").split())
