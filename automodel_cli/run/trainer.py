"""Trainer: all objects of a run on one rank, and its training loop.

model -> parallelizer -> weights -> optimizer and schedule -> checkpoint, if the run is resumed -> metrics
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.config.fix_syntax import word
from automodel_cli.data.batch import Batch, Columns, unchanged
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.launch import process_startup, signals
from automodel_cli.models.hub import passthrough_tensors
from automodel_cli.objectives.base import Objective, metrics_of
from automodel_cli.run import best_checkpoint, resumed_schedule
from automodel_cli.run.base_model_fingerprint import base_model_fingerprint, check_base_model_unchanged
from automodel_cli.run.loaders import make_loader
from automodel_cli.run.memory.auto_activation_checkpointing import decided_together
from automodel_cli.run.model_builder import Model, flops_per_token
from automodel_cli.run.recipe import Recipe
from automodel_cli.run.run_directory import recreate_run_directory
from automodel_cli.run.tower_cost import tower_flops_per_token
from automodel_cli.runs.run_record import RunRecord
from automodel_cli.training.callback import Callbacks
from automodel_cli.training.checkpoint import rng
from automodel_cli.training.checkpoint.checkpointer import Checkpointer
from automodel_cli.training.checkpoint.directory import CheckpointDir
from automodel_cli.training.config import CheckpointConfig
from automodel_cli.training.early_stopping import EarlyStop
from automodel_cli.training.metrics.flops import device_peak_flops
from automodel_cli.training.metrics.metric_accumulator import shown_metrics
from automodel_cli.training.metrics.metric_logger import Machine, MetricLogger, Scalar
from automodel_cli.training.metrics.peak_memory import max_over_ranks, peak_memory_gib
from automodel_cli.training.monitors.profiling import StepProfiler
from automodel_cli.training.monitors.straggler import SlowRank
from automodel_cli.training.monitors.watchdog import Watchdog
from automodel_cli.training.optimizers.build import build_optimizer
from automodel_cli.training.optimizers.lr_scheduler import build_lr_scheduler
from automodel_cli.training.optimizers.rate_groups import shown_ratio
from automodel_cli.training.optimizers.schedule_plan import extended_factor
from automodel_cli.training.step import NonFiniteError, StepResult, train_step

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from automodel_cli.config.composition.compose import Composed


@runtime_checkable
class AddsColumns(Protocol):
    """A recipe whose objective reads more than the data. Other recipes have no `columns`."""

    def columns(self, session: Trainer) -> Columns:
        """Return the function that adds those columns. Called once, directly after the model is loaded. Collective."""


class Trainer:
    """State of a recipe's loop: the next microbatches, one step, and actions due after it. Created by
    `build_trainer`."""

    def __init__(
        self,
        recipe: Recipe,
        source: Composed,
        data: Any,
        tokenizer: PreTrainedTokenizerBase,
        mesh: Mesh,
        run_dir: Path,
        record: RunRecord,
    ):
        recipe, self.recomputed = decided_together(recipe, mesh)
        self.recipe, self.source, self.data, self.tokenizer = recipe, source, data, tokenizer
        self.mesh, self.run_dir, self.record = mesh, run_dir, record
        self.is_main = dist.get_rank() == 0
        self.loader = make_loader(recipe, data.train, mesh)
        self.num_steps = recipe.train.num_steps(self.loader.steps_per_epoch)
        self.checkpointer = Checkpointer(run_dir, _where_to_resume(recipe, source), recipe.validation.goal)
        self._resumed_from = self.checkpointer.resume_path()
        self.schedule, self.extended = resumed_schedule.plan_schedules(recipe, self.num_steps, self._resumed_from)
        self.model = Model.build(recipe, mesh)
        self.after_step: list[Callable[[int], None]] = []
        self.columns: Columns = recipe.columns(self) if isinstance(recipe, AddsColumns) else unchanged
        self.optimizer = build_optimizer(recipe.optimizer, self.model.parts)
        self._shown_ratio = shown_ratio(recipe.optimizer, self.optimizer)
        factor = extended_factor(recipe.lr_scheduler, self.schedule)
        self.scheduler = build_lr_scheduler(recipe.lr_scheduler, self.optimizer, self.num_steps, factor)
        rng.seed(recipe.seed, dist.get_rank())
        self._callback_states: Mapping[str, object] = {}
        self._begun_from = base_model_fingerprint(recipe.model)
        self._other_weights: str | None = None
        self._new_data: str | None = None
        self.last_validation: tuple[int, dict[str, float]] = -1, {}
        self._owed_to: Path | None = None
        self.early_stop = EarlyStop(recipe.validation.goal, recipe.validation.patience)
        self.first_step = self.last_step = self._resume()
        self.best_restored: int | None = None
        self.stopped_by, self.has_begun = 0, False
        self._noticed: int | None = None
        self._data_seconds = 0.0
        self.at_exit = ExitStack()
        self.at_exit.callback(self.loader.close)
        self._metrics: dict[str, float] = {}
        self.meter = self._make_meter()
        self.watch = Watchdog(recipe.train.step_timeout_seconds, run_dir / "logs", lambda: signals.resume_hint(run_dir))
        self.slow_rank = SlowRank()
        self.profiler = StepProfiler(recipe.logging.profile, run_dir, dist.get_rank())
        self.callbacks = Callbacks(self, self._callback_states)
        for line in (self._other_weights, self._new_data):
            if line:
                self.print(line)
        unclaimed = self.model.parts[0].unclaimed if recipe.score_head is None else ()  # models of scores lack them
        if self.is_main and unclaimed:  # it reads the headers of all files
            self.print(passthrough_tensors.passthrough_summary(recipe.model, unclaimed))

    def _make_meter(self) -> MetricLogger:
        return MetricLogger(
            self.run_dir,
            self.recipe.logging,
            num_steps=self.num_steps,
            machine=self._machine(),
            is_main=self.is_main,
            resume_step=self.first_step,
            tracked_config=self.source.public(),
        )

    def steps(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield each step number (from 1) and the microbatches of this rank, until the run ends or a signal stops it.

        After the loop body, due validations and checkpoints run, and all ranks agree whether to stop.
        """
        process_startup.enable_gc()
        self.has_begun = True
        for name in self.callbacks.unclaimed():
            self.print(
                f"the checkpoint state of callback {name} is ignored, because this run does not have the callback"
            )
        for name in self.checkpointer.dropped():
            self.print(f"the {name} in the checkpoint is ignored; this run uses the loaded {name}")
        self._run_pending_validation()
        self.meter.start()
        with self.watch:
            yield from self._steps()
            if self.early_stop.patience is not None and not self.stopped_by:
                self._restore_best()
        self._ensure_run_directory()

    def _steps(self) -> Iterator[tuple[int, list[Any]]]:
        for step in range(self.first_step + 1, self.num_steps + 1):
            if self.early_stop.is_over:
                return
            self.profiler.before(step)
            self._noticed = None
            self.watch.step(step)
            began = time.perf_counter()
            batches = self.loader.next_step()
            self._data_seconds = time.perf_counter() - began
            yield step, batches
            self.profiler.after(step)
            validates = self.recipe.validation.due(step, self.num_steps)
            # The step has agreed on stop requests before its loss was summed. A validation does not wait for any.
            self.stopped_by = self._agree_to_stop() if validates or self._noticed is None else self._noticed
            if validates and not self.stopped_by:
                self.validate(step)
                self.stopped_by = self._agree_to_stop()  # a validation may take long, and a notice expires
            self.last_step = step
            end = step if self.early_stop.is_over else self.num_steps
            is_best = validates and self.early_stop.improved(step)
            if self.recipe.checkpoint.due(step, end) or self.stopped_by or is_best:
                self.save(step)
            if self.stopped_by:
                self.meter.print(f"stopped after step {step}; continue with: automodel resume {word(self.run_dir)}")
                return

    def train(
        self,
        step: int,
        *updates: list[Batch],
        shown: Mapping[str, Scalar] = MappingProxyType({}),
        unshown: Mapping[str, Scalar] = MappingProxyType({}),
    ) -> dict[str, Tensor]:
        """Run the optimizer updates of one step (usually one) and record their mean as one metrics row.

        Args:
            shown, unshown: further columns of the row. `shown` also appears on the step line.

        Returns:
            The metrics of the objective. A non-finite step ends the run with an error that names its rows.
        """
        results = [self._update(step, batches) for batches in updates]
        self._data_seconds = 0.0
        self._noticed = max((result.stop_signal for result in results), default=None)
        lr = self.scheduler.get_last_lr()[0] * self._shown_ratio
        self.scheduler.step()
        for follow in self.after_step:
            follow(step)
        counts = [(b.input_ids_BT.numel(), int(b.num_label_tokens)) for batches in updates for b in batches]
        local = torch.tensor(counts, dtype=torch.int64).view(-1, 2).sum(0)
        num_tokens, num_label_tokens = self.mesh.sum_over(self.mesh.dp, local).unbind()
        metrics = _over_updates([result.metrics for result in results], self.recipe.trained_objective)
        on_line = shown_metrics(self.recipe.trained_objective)
        shown = {**shown, **{name: value for name, value in metrics.items() if name in on_line}}
        unshown = {**{name: value for name, value in metrics.items() if name not in on_line}, **unshown}
        loss, grad_norm = _mean([r.loss for r in results]), _mean([r.grad_norm for r in results])
        if results:
            unshown = {**unshown, **self.slow_rank.add(torch.stack([r.busy_seconds for r in results]).sum(0))}
        counted = {"num_label_tokens": num_label_tokens, "num_tokens": num_tokens}
        unshown = {**unshown, **self.loader.token_shares()}
        row = {"loss": loss, "grad_norm": grad_norm, "lr": lr, **counted, **shown, **unshown}
        self.meter.step(
            step,
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            **counted,
            memory_gib=self._memory() if self.meter.due(step) else None,
            data_seconds=results[0].data_seconds.max() if results else None,
            unshown={**unshown, **self.callbacks.step(step, row)},
            **shown,
        )
        if self.meter.due(step):
            self.loader.check()
        if self.is_main and self.meter.due(step) and (warning := self.slow_rank.warning()) is not None:
            rank, text = warning
            self.print(f"rank {rank} on {self.watch.host_of(rank)} is slower than the others: {text}")
        return metrics

    def _update(self, step: int, batches: list[Batch]) -> StepResult:
        try:
            return train_step(
                self.model.stages,
                self.columns(batches),
                self.recipe.trained_objective,
                self.optimizer,
                self.mesh,
                max_grad_norm=self.recipe.train.max_grad_norm,
                hooks=self.model.step_hooks,
                stop_signal=lambda: signals.requested() or 0,
                progress=self.watch.tick,
                busy_seconds=self.watch.busy_seconds,
                data_seconds=self._data_seconds,
            )
        except NonFiniteError as error:
            raise error.located(step, self.data.train.describe) from error

    def validate(self, step: int) -> None:
        """Evaluate the model on the validation rows and tasks, if there are any, and record the metrics."""
        if not self._validates:
            return
        with self.meter.pause(), self.watch.long("a validation"):
            self._metrics = self.callbacks.validation(step)
        self.last_validation = step, self._metrics
        self.meter.validation(step, **self._metrics)
        best_checkpoint.count_validation(self.early_stop, step, self._metrics)

    @property
    def _validates(self) -> bool:
        return self.data.validation is not None or bool(self.recipe.validation.tasks)

    def _run_pending_validation(self) -> None:
        """Run the validation that was skipped because a signal stopped the run at its step."""
        if self._owed_to is not None:
            self.validate(self.first_step)
            self.checkpointer.add_metrics(self._owed_to, self._metrics, {"validated": self.first_step})
            self._metrics = {}

    def save(self, step: int) -> None:
        """Save a checkpoint of all state that the next step depends on."""
        self._ensure_run_directory()
        with self.meter.pause(), self.watch.long("a checkpoint"):
            self.checkpointer.save(
                step,
                self.model.parts,
                self.optimizer,
                self.scheduler,
                extra={
                    "loader": self.loader.state_dict(),
                    "validated": self.last_validation[0],
                    "callbacks": self.callbacks.checkpoint(step),
                    "begun_from": self._begun_from,
                    "early_stop": self.early_stop.state_dict(),
                    "taught_stops": list(self.taught_stops),
                    resumed_schedule.KEY: self.schedule.as_json(),
                },
                metrics=self._metrics,
            )
        self._metrics = {}

    @property
    def taught_stops(self) -> Sequence[int]:
        """Return the stop tokens that end responses in the training rows."""
        stops: list[int] = self.data.train.taught_stops()
        return stops

    def _restore_best(self) -> None:
        """Load the weights of the best checkpoint for the export. Collective."""
        with self.meter.pause(), self.watch.long("loading the best checkpoint"):
            loaded = best_checkpoint.load_best(self.checkpointer, self.model.parts, self.last_step)
        if loaded is not None:
            self.best_restored = loaded.step
            self.last_validation = self.last_step, loaded.metrics
            metric = self.early_stop.goal.metric
            self.print(f"restored the weights of {loaded.path.name}, the best checkpoint by {metric}")

    def _ensure_run_directory(self) -> None:
        """Recreate the run folder with its config and metrics if it was removed."""
        if self.is_main and recreate_run_directory(self.run_dir, self.source):
            self.meter.write_again()
            self.print(f"{self.run_dir} was removed during the run; its config and metrics were written again")

    def validate_if_due(self, step: int) -> None:
        """Validate before the first step if the config sets it."""
        if self.recipe.validation.due(step, self.num_steps) and step == 0:
            self.validate(step)

    def print(self, text: str) -> None:
        """Print a line on rank 0."""
        self.meter.print(text)

    def exit_code(self) -> int:
        """Return 0, or the exit code of a run that a signal stopped."""
        return signals.exit_code(self.stopped_by)

    def _resume(self) -> int:
        path = self._resumed_from
        if path is None:
            return 0
        resumed = self.checkpointer.load(path, self.model.parts, self.optimizer, self.scheduler)
        saved = resumed.extra.get("begun_from")
        self._other_weights = check_base_model_unchanged(self.recipe, self._begun_from, saved)
        self._begun_from = saved or self._begun_from
        accepts = self.recipe.checkpoint.new_data == "restart"
        if self.loader.load_state_dict(resumed.extra["loader"], accept_new_data=accepts):
            self._new_data = "the data differ from those of the checkpoint and are read from their start"
        elif new := self.loader.new_files():
            self._new_data = f"{new} files are new since the checkpoint and are read after the known ones"
        self._callback_states = resumed.extra.get("callbacks", {})
        if (counted := resumed.extra.get("early_stop")) is not None:
            self.early_stop.load_state_dict(counted)
        owed = self.recipe.validation.due(resumed.step, self.num_steps) and resumed.extra["validated"] != resumed.step
        self._owed_to = path if owed and self._validates else None
        return resumed.step

    def _agree_to_stop(self) -> int:
        """Return the signal that any rank received, or 0, equal on all ranks. Collective.

        After a step, the reduction of its loss has already exchanged the signal.
        """
        return int(max_over_ranks(signals.requested() or 0, self.mesh.device))

    def _memory(self) -> float:
        return max_over_ranks(peak_memory_gib(self.mesh.device), self.mesh.device)

    def _machine(self) -> Machine:
        model, length = self.model, self.data.train.mean_context()
        flops = flops_per_token(self.recipe, model.parts[0], length, model.num_trained)
        of_tower = tower_flops_per_token(self.recipe.model.vision, model.parts[0], self.data.train)
        flops = None if flops is None or of_tower is None else flops + of_tower
        on_gpu = self.mesh.device.type == "cuda"
        peak = device_peak_flops(torch.cuda.get_device_name(self.mesh.device)) if on_gpu else None
        return Machine(dist.get_world_size(), flops, peak)

    def close(self, *, succeeded: bool) -> None:
        """Finish pending checkpoints, callbacks and metrics. Also called when the run fails."""
        self.watch.stop()
        with self.at_exit:
            failure = self.callbacks.end(succeeded=succeeded)
            self.profiler.close()
            self.checkpointer.close()
            self.meter.close(succeeded=succeeded and failure is None)
        if failure is not None:
            raise failure


def _where_to_resume(recipe: Recipe, source: Composed) -> CheckpointConfig:
    """Return the checkpoint config, with `resume=auto` if the run folder already has checkpoints."""
    if source.run_dir is None or CheckpointDir(source.run_dir / "checkpoints").latest() is None:
        return recipe.checkpoint
    return dataclasses.replace(recipe.checkpoint, resume="auto")


def _mean(values: Sequence[Tensor]) -> Scalar:
    """Return the mean, or nan if a step had no update."""
    return torch.stack(list(values)).mean() if values else math.nan


def _over_updates(results: Sequence[Mapping[str, Tensor]], objective: Objective) -> dict[str, Tensor]:
    """Combine the metrics of several updates of a step: extrema by min or max, others by their mean."""
    combine = {name: metric.combine for name, metric in metrics_of(objective).items()}
    means = {}
    for name in results[0] if results else ():
        values = torch.stack([result[name] for result in results])
        kind = combine.get(name, "mean")
        means[name] = values.amin(0) if kind == "min" else values.amax(0) if kind == "max" else values.float().mean(0)
    return means
