"""Your own callback: it writes every best loss to a file of its own, and adds a column to metrics.jsonl.

    automodel finetune llm -c quickstart \
        'callbacks=[{_target_: own_callback.BestLoss, file: best.txt}]' --trust-package own_callback
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from automodel_cli.training.callback import Callback, Run


class BestLoss(Callback):
    """Adds `best_loss`, the smallest loss until then; a run that goes on remembers it from its checkpoint."""

    def __init__(self, file: str = "best.txt"):
        self._name, self._best = file, math.inf

    def on_start(self, run: Run, state: Any) -> None:
        self._best = math.inf if state is None else state
        self._file = run.run_dir / self._name

    def on_step(self, run: Run, step: int, values: Mapping[str, Any]) -> dict[str, float]:
        if (loss := float(values["loss"])) < self._best:
            self._best = loss
            if run.is_main:
                with self._file.open("a") as file:
                    file.write(f"{step} {loss}\n")
        return {"best_loss": self._best}

    def on_checkpoint(self, run: Run, step: int) -> float:
        return self._best

    def on_end(self, run: Run, succeeded: bool) -> None:
        run.print(f"best loss {self._best:.4f}")
