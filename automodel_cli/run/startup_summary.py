"""Startup summary of a run, printed before the first step and stored in its record."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from automodel_cli import __version__
from automodel_cli.config.composition import bundled_recipes
from automodel_cli.config.security.safe_files import replace
from automodel_cli.data.preparation.dataloader import BatchLoader
from automodel_cli.distributed import kernel_report
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.launch import process_startup
from automodel_cli.models.kernel_lines import attention_lines
from automodel_cli.models.lm_head.kernels import has_head_kernels
from automodel_cli.report.software_versions import environment
from automodel_cli.run.checks.data_checks import warn_of_repeated_rows
from automodel_cli.run.recipe import Recipe
from automodel_cli.runs.report_page import SCHEDULE
from automodel_cli.training.metrics.progress import aligned

if TYPE_CHECKING:
    from automodel_cli.run.trainer import Trainer


def _kernels(session: Trainer) -> str:
    """Return one line per subject: the kernel that runs, or torch operators with the reason."""
    has_head_kernels(session.mesh.device.type)  # records its line
    rows = aligned([*attention_lines(session.recipe.model, session.model.parts), *kernel_report.lines().items()])
    return "\n".join(rows)


def show_header(session: Trainer, further: Sequence[tuple[str, str]] = ()) -> None:
    """Print the startup summary and store it in the record of the run.

    Args:
        further: more rows, each (short label, text).
    """
    rows = [*_header_rows(session), *further]
    session.meter.header(rows)
    if session.is_main:
        _describe(session, dict(rows[1:]))
        _warn_of_repeated_rows(session)


def _header_rows(session: Trainer) -> list[tuple[str, str]]:
    """Return the rows of the summary as (short label, text)."""
    recipe, model = session.recipe, session.model
    share = "" if model.num_trained == model.num_parameters else f", {_count(model.num_trained)} trained"
    steps = f"{session.num_steps}{_epochs(session)}, by {recipe.train.limit(session.loader.steps_per_epoch)}"
    ranks = f"{_plural(dist.get_world_size(), 'rank')} on {session.mesh.device.type}"
    begin = f", from step {session.first_step}" if session.first_step else ""
    if not begin and session.source.run_dir is not None:  # `automodel resume` of a run that stopped early
        begin = ", from the start, because the run has no checkpoint"
    return [
        ("automodel", f"{__version__}   run {session.run_dir}"),
        (
            "config",
            f"{bundled_recipes.display(session.source.path)}   {_plural(len(session.source.overrides), 'override')}",
        ),
        (
            "model",
            f"{_model_name(recipe)}   {_count(model.num_parameters)} parameters{share}   {_precision(recipe)}",
        ),
        ("layout", f"{ranks}   {_layout(recipe, session.mesh)}"),
        *([("recompute", session.recomputed)] if session.recomputed else []),
        ("kernels", _kernels(session)),
        *([("allocator", process_startup.allocator())] if session.mesh.device.type == "cuda" else []),
        ("data", "\n".join(session.data.report.lines())),
        ("steps", f"{steps}   {step_size(session)} a step{begin}"),
        *([("schedule", session.extended)] if session.extended else []),
    ]


def _epochs(session: Trainer) -> str:
    """Return the length of the run in epochs as text, empty for a stream."""
    loader = session.loader
    if not isinstance(loader, BatchLoader):
        return ""
    return f" = {loader.position_after(session.num_steps) / loader.stream.rows_per_epoch:.2f} epochs"


def _warn_of_repeated_rows(session: Trainer) -> None:
    loader, recipe = session.loader, session.recipe
    if isinstance(loader, BatchLoader):
        rows = loader.stream.rows_per_epoch
        warn_of_repeated_rows(rows, **recipe.rows_of_a_step(), row_name=recipe.row_name, dp_size=session.mesh.dp_size)


def step_size(session: Trainer) -> str:
    """Return the size of one step as text: `8 rows (about 61.3 documents)`."""
    num_rows, row_name = session.loader.global_batch_size, session.recipe.row_name
    ramp = session.recipe.train.batch_size_ramp
    grows = "" if ramp is None else f", from {ramp.start} over the first {ramp.rows:,}"
    noun, per_row = session.data.train.units_per_row()
    number = num_rows * per_row
    if noun == row_name:
        return f"{num_rows} {row_name}{grows}"
    if number.is_integer():
        return f"{num_rows} {row_name} ({number:,.0f} {noun}){grows}"
    digits = f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
    return f"{num_rows} {row_name} (about {digits} {noun}){grows}"


def _describe(session: Trainer, about: Mapping[str, str]) -> None:
    """Store `about`, the environment, the data and the mesh in the record. Rank 0 only."""
    device = session.mesh.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    session.record.describe_attempt(
        first_step=session.first_step, environment=environment(name, session.mesh.layout.world_size)
    )
    session.record.describe(
        recipe=session.recipe.kind,
        num_steps=session.num_steps,
        about=dict(about),
        data={
            "contents": [list(pair) for pair in session.data.train.contents],
            "statistics": session.data.train.statistics(),
        },
        layout=dataclasses.asdict(session.mesh.layout),
    )
    num_microbatches = session.recipe.train.num_microbatches(session.mesh.dp_size)
    if picture := session.model.stages.schedule_svg(num_microbatches):
        replace(session.run_dir / SCHEDULE, picture)


def _precision(recipe: Recipe) -> str:
    """Return the dtype of the parameters, and the dtype of the GEMMs if it differs."""
    stored, computed = recipe.model.dtype, str(recipe.compute_dtype).removeprefix("torch.")
    return stored if computed == stored else f"{stored}, computes in {computed}"


def _model_name(recipe: Recipe) -> str:
    model = recipe.model
    if model.config is not None:
        return f"{model.config['model_type']} (random weights)"
    return "/".join(part for part in (model.pretrained, model.gguf_file) if part)


def _layout(recipe: Recipe, mesh: Mesh) -> str:
    return f"{recipe.parallelizer.name}: {mesh.layout}"


def _count(number: int) -> str:
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= unit:
            return f"{number / unit:.3g}{name}"
    return str(number)


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
