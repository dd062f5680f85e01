"""Reference model, and log-probs under the sampling distribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import HeadOutput, HeadRequest
from automodel_cli.distributed.sharded_module import weights_changed
from automodel_cli.distributed.tensors import to_local
from automodel_cli.models.lm_head.sampling_transform import SamplingTransform
from automodel_cli.models.lora.adapters import adapters_off
from automodel_cli.run.frozen_models.teacher import build_teacher
from automodel_cli.run.model_builder import Model
from automodel_cli.training.checkpoint.state_dict import copy_state, model_state
from automodel_cli.training.stages import Stages

if TYPE_CHECKING:
    from automodel_cli.models.teacher_config import TeacherConfig
    from automodel_cli.run.frozen_models.reference_sync import ReferenceSync
    from automodel_cli.run.trainer import Trainer


class ReferenceModel:
    """Context manager that runs the reference model. Build it before the first step. Collective.

    The reference is one of:

    - a frozen copy of the loaded model
    - with `without_adapters`, the model itself with its adapters disabled
    - a `teacher`
    - with `update`, a frozen copy with separate adapters, which follows the model after each due step. Checkpoints
      contain its trained weights.

    Log-probs are computed at `temperature`.
    """

    def __init__(
        self,
        session: Trainer,
        *,
        without_adapters: bool,
        temperature: float = 1.0,
        teacher: TeacherConfig | None = None,
        update: ReferenceSync | None = None,
    ):
        without_adapters = without_adapters and update is None
        if teacher is not None:
            without_adapters = False
            self._model = build_teacher(session, teacher)
        else:
            model = session.model
            self._model = model if without_adapters else Model.build(session.recipe, session.mesh, frozen=True)
        self._without_adapters = without_adapters
        self._shaping = SamplingTransform(temperature)  # no filters: sampled tokens always have a probability
        self._stack = ExitStack()
        if update is not None:
            self._follow(session, update)

    def _follow(self, session: Trainer, update: ReferenceSync) -> None:
        policy, copies = session.model.parts, self._model.parts
        theirs = copy_state(copies, policy)
        session.checkpointer.keep("reference", theirs, copies)

        def after(step: int) -> None:
            if update.due(step):
                for name, policy_value in model_state(policy).items():
                    update_ema(theirs[name], policy_value, update.mixup_alpha)
                weights_changed(copies)

        session.after_step.append(after)

    def __enter__(self) -> Stages:
        self._stack = ExitStack()
        self._stack.enter_context(sampling_distribution(self._model, self._shaping))
        if self._without_adapters:
            self._stack.enter_context(adapters_off(self._model.parts))
        return self._model.stages

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


@torch.no_grad()
def update_ema(into: Tensor, other: Tensor, alpha: float) -> None:
    """Set `into` to alpha x other + (1 - alpha) x into, each rank its shard. Integer tensors are copied."""
    to, of = map(to_local, (into, other))
    if alpha == 1 or not to.is_floating_point():
        to.copy_(of)
    else:
        to.lerp_(of, alpha)


def draws_while_training(model: Model) -> bool:
    """Whether a training forward may use random numbers (dropout, jitter of routers): then it does not score tokens as
    an evaluation does. By the modules and by the config, of which any such share above 0 counts.
    """
    for part in model.parts:
        if any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0 for module in part.modules()):
            return True
        fields = part.model.config.get_text_config().to_dict()
        if any(_is_random(name) and isinstance(value, float) and value > 0 for name, value in fields.items()):
            return True
    return False


def _is_random(name: str) -> bool:
    return "drop" in name or name.endswith("jitter_noise")


def batch_logprobs(stages: Stages, batches: Sequence[Batch], device: torch.device) -> list[Tensor]:
    """Log-probs [B, T] of the labels of every batch, as the model is now. Collective."""
    return stages.forward([batch.to(device) for batch in batches], lambda output, _: output.logprobs_BT)


def fields_of(
    stages: Stages, batches: Sequence[Batch], device: torch.device, request: HeadRequest, *names: str
) -> list[tuple[Tensor, ...]]:
    """These fields of `HeadOutput`, all [B, T], of one pass over every batch. Collective."""

    def asked(output: HeadOutput, _: Batch) -> Tensor:
        return torch.stack([getattr(output, name) for name in names])

    return [field.unbind() for field in stages.forward([batch.to(device) for batch in batches], asked, request)]


@contextmanager
def sampling_distribution(model: Model, shaping: SamplingTransform) -> Iterator[None]:
    """Context in which log-probs of `model` are those of its logits after `shaping`."""
    before = [part.head.shaping for part in model.parts]
    for part in model.parts:
        part.head.shaping = None if shaping == SamplingTransform() else shaping
    try:
        yield
    finally:
        for part, earlier in zip(model.parts, before, strict=True):
            part.head.shaping = earlier
