"""Models as they score samples: under the distribution that was sampled from, and the reference model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from automodel_cli.models.lora import adapters_off
from automodel_cli.rollout.sampling import Shaping
from automodel_cli.training.stages import Stages
from recipes.model import Model


class ReferenceModel:
    """A context in which the reference model can be run: a copy, or the model itself without its adapters."""

    def __init__(self, model: Model, temperature: float, *, adapters: bool):
        self._model, self._adapters = model, adapters
        self._shaping = Shaping(temperature)  # no filters: a token that they would drop here has been drawn
        self._stack = ExitStack()

    def __enter__(self) -> Stages:
        self._stack = ExitStack()
        self._stack.enter_context(shaped(self._model, self._shaping))
        if self._adapters:
            self._stack.enter_context(adapters_off([part.model for part in self._model.parts]))
        return self._model.stages

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


@contextmanager
def shaped(model: Model, shaping: Shaping) -> Iterator[None]:
    """Inside, the log-probs of `model` are those of the distribution that `shaping` makes of its logits."""
    before = [part.head.shaping for part in model.parts]
    for part in model.parts:
        part.head.shaping = None if shaping == Shaping() else shaping
    try:
        yield
    finally:
        for part, earlier in zip(model.parts, before, strict=True):
            part.head.shaping = earlier
