"""Fake quantization during a run: its first step, and what quantization costs on held-out rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from automodel_cli.distributed.qat.linear import set_active, switched
from automodel_cli.training.callback import Callback, Run

if TYPE_CHECKING:
    from automodel_cli.models.qat_config import QATConfig
    from automodel_cli.run.trainer import Trainer
    from automodel_cli.run.validation_loss import HeldOutLoss
    from automodel_cli.training.callback import Number

_UNQUANTIZED, _QUANTIZED = "unquantized", "quantized"


class FakeQuantizationRun(Callback):
    """Quantize from step `fake_quant_after_n_steps` + 1 on, and measure the held-out loss with and without."""

    def __init__(self, session: Trainer, config: QATConfig, held_out: HeldOutLoss):
        self._session, self._config, self._held_out = session, config, held_out
        self._losses: dict[str, float] = {}
        self._is_active: bool | None = None

    @classmethod
    def added_to(cls, session: Trainer, held_out: HeldOutLoss) -> FakeQuantizationRun | None:
        """Add the callback to a run that quantizes, and return it."""
        config = session.recipe.model.qat
        if config is None:
            return None
        callback = cls(session, config, held_out)
        session.callbacks.add(callback)
        return callback

    def on_start(self, run: Run, state: Any) -> None:
        self._losses = dict(state or {})
        self._switch(run.first_step)

    def on_step(self, run: Run, step: int, values: Mapping[str, Number]) -> None:
        self._switch(step)

    def on_checkpoint(self, run: Run, step: int) -> object:
        return self._losses

    def measure(self, when: str) -> None:
        """Measure both losses `before` or `after` training, print and record them. Collective.

        A resumed run keeps those from before its first step.
        """
        session = self._session
        if session.data.validation is None or (when == "before" and session.first_step > 0):
            return
        losses = {}
        with session.meter.pause(), session.watch.long("a validation"):
            for name, active in ((_UNQUANTIZED, False), (_QUANTIZED, True)):
                with switched(session.model.parts, active=active):
                    found = self._held_out.on_validation(session, session.last_step, {})
                    losses[name] = found["val_loss"]
        self._losses |= {f"{name} {when}": loss for name, loss in losses.items()}
        step = session.last_step
        session.print(
            f"held-out loss {when} training: {losses[_UNQUANTIZED]:.4f} unquantized, {losses[_QUANTIZED]:.4f} "
            f"quantized to {self._config.weight_dtype} ({losses[_QUANTIZED] - losses[_UNQUANTIZED]:+.4f}), step {step}"
        )

    @property
    def numbers(self) -> dict[str, str]:
        """The losses for the record of the run."""
        return {f"held-out loss, {name} training": f"{loss:.4f}" for name, loss in self._losses.items()}

    def _switch(self, completed: int) -> None:
        is_active = completed >= self._config.fake_quant_after_n_steps
        if is_active == self._is_active:
            return
        self._is_active = is_active
        set_active(self._session.model.parts, is_active)
