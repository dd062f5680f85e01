"""Summaries of a pipeline: modules, parameters and a drawing of its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.pipelining.schedule.program import Program
from automodel_cli.pipelining.timeline.simulator import even_costs, simulate

if TYPE_CHECKING:
    from automodel_cli.pipelining.cut.stage_plan import StagePlan
    from automodel_cli.pipelining.torch_runtime.runtime_compat import Runtime
    from automodel_cli.pipelining.torch_runtime.torch_compat import Stage


@dataclass
class PipelineInfo:
    """Summary of the stages on this rank. `model_parts` and `stages` are None before `build`.

    With a V placement, rank 0 has both the first and the last stage.
    """

    enabled: bool
    schedule: Runtime | None
    has_first_stage: bool
    has_last_stage: bool
    model_parts: list[nn.Module] | None
    stages: list[Stage] | None


def stage_modules(parts: Sequence[nn.Module] | None) -> list[list[str]]:
    """Return the names of the modules that own parameters, per part."""
    return [
        [name for name, m in part.named_modules() if any(True for _ in m.parameters(recurse=False))]
        for part in parts or []
    ]


def param_counts(parts: Sequence[nn.Module] | None, trainable_only: bool) -> list[int]:
    """Return the number of unsharded parameters per part."""
    return [sum(p.numel() for p in part.parameters() if p.requires_grad or not trainable_only) for part in parts or []]


def pretty_stages(info: PipelineInfo, max_modules: int, trainable_only: bool) -> str:
    if not info.model_parts:
        return "<no stages>"
    indices = [stage.stage_index for stage in info.stages] if info.stages else list(range(len(info.model_parts)))
    counts, modules = param_counts(info.model_parts, trainable_only), stage_modules(info.model_parts)
    kind = "trainable parameters" if trainable_only else "parameters"
    lines = []
    for index, count, names in zip(indices, counts, modules, strict=True):
        lines.append(f"stage {index}: {count:,} {kind}")
        lines += [f"  {name}" for name in names[:max_modules]]
        if len(names) > max_modules:
            lines.append(f"  ... and {len(names) - max_modules} more modules")
    return "\n".join(lines)


def pipeline_summary(info: PipelineInfo, plan: StagePlan | None, num_microbatches: int) -> str:
    local = info.model_parts or []
    lines = [f"Local stages: {len(local)}", f"Schedule: {info.schedule.program.schedule if info.schedule else None}"]
    if plan is not None and info.stages:
        lines.append(f"Stages: {plan.num_stages} on {plan.pp_size} ranks, {num_microbatches} microbatches per step")
        for stage, count in zip(info.stages, param_counts(local, False), strict=True):
            held = plan.layers[stage.stage_index]
            layers = f"layers {held.start}-{held.stop - 1}" if held else "no layers"
            ends = ", embedding" * stage.is_first + ", head" * stage.is_last
            lines.append(f"  stage {stage.stage_index}: {layers}{ends}; {count:,} parameters")
    return "\n".join(lines)


def draw_program(program: Program, path: Path | None) -> str:
    """Draw the timeline of a program with equal costs, as text or as an SVG file. Returns the text or the path."""
    from automodel_cli.pipelining.timeline import svg as drawing

    timeline = simulate(program, even_costs(program))
    if path is None:
        return drawing.draw_text(timeline)
    if path.suffix.lower() == ".svg":
        path.write_text(drawing.draw_svg(timeline), encoding="utf-8")
    else:
        raise ConfigError(
            f"filename={str(path)!r} must end in .svg",
            code="unsupported_file_type",
            keys=("filename",),
            fix=f"filename={path.with_suffix('.svg')}",
        )
    return str(path)
