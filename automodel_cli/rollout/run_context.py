"""Interface between engines and the owner of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from contextlib import ExitStack
    from pathlib import Path

    from transformers import PreTrainedTokenizerBase

    from automodel_cli.distributed.mesh import Mesh
    from automodel_cli.run.model_builder import Model
    from automodel_cli.run.recipe import Recipe


class RunContext(Protocol):
    """Requirements of an engine on the owner of a model: a training session, or an evaluation."""

    @property
    def recipe(self) -> Recipe: ...
    @property
    def mesh(self) -> Mesh: ...
    @property
    def model(self) -> Model: ...
    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...
    @property
    def run_dir(self) -> Path: ...
    @property
    def is_main(self) -> bool: ...
    @property
    def at_exit(self) -> ExitStack: ...
    @property
    def taught_stops(self) -> Sequence[int]:
        """The tokens at which training taught the model to stop."""
        ...
