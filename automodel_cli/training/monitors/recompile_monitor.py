"""Count the graphs compiled per step. Many are normal in the first step, any after the third causes a warning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from automodel_cli.config.warn import warn
from automodel_cli.data.batch import Batch
from automodel_cli.distributed.fusion import compiled_regions

_SETTLED_AFTER = 3


class CompileWatch:
    """`StepHook` for the metric `compiled_graphs` of this rank. Warns once if graphs are compiled later."""

    def __init__(self) -> None:
        self._steps = self._before = 0
        self._has_warned = False

    def begin(self, batches: Sequence[Batch]) -> None:
        self._before = len(compiled_regions.compilations)

    def finish(self) -> dict[str, Tensor]:
        self._steps += 1
        new = compiled_regions.compilations[self._before :]
        if new and self._steps > _SETTLED_AFTER and not self._has_warned:
            self._has_warned = True
            names = ", ".join(f"{name} ({count})" for name, count in Counter(new).items())
            warn(
                "recompilation",
                "step %d of this process compiled again: %s. Each new input shape costs seconds. "
                "Set parallelizer.enable_compile=false to disable compilation.",
                self._steps,
                names,
            )
        return {"compiled_graphs": torch.tensor(float(len(new)))}
