"""Objectives that fail in a traced step, each for another reason."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.objectives.sft import SFT


@dataclass(frozen=True)
class WrongShape(SFT):
    """Fails on a GPU too."""

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        return (output.logprobs_BT @ output.logprobs_BT.new_ones(3)).sum()


@dataclass(frozen=True)
class WrongName(SFT):
    """Fails on a GPU too: an attribute of nothing that the dry run replaces."""

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        return output.no_such_field.sum()  # type: ignore[attr-defined, no-any-return]


@dataclass(frozen=True)
class AsksTheStream(SFT):
    """Asks the stand-in for a name that it lacks."""

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        torch.cuda.current_stream().no_such_method()  # type: ignore[attr-defined]
        return super().__call__(output, batch)


@dataclass(frozen=True)
class AsksTheDevice(SFT):
    """Calls a function of CUDA that has no stand-in."""

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        torch.cuda.current_blas_handle()
        return super().__call__(output, batch)


@dataclass(frozen=True)
class ReadsValues(SFT):
    """The size of its result depends on values of floats."""

    def __call__(self, output: HeadOutput, batch: Batch) -> Tensor:
        return output.logprobs_BT[output.logprobs_BT < 0].sum()
