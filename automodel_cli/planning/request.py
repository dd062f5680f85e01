"""Request of a plan: the sections of a config that memory and time depend on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from automodel_cli.config.parameter_patterns import EVERYTHING, Selection
from automodel_cli.data.head_output import LOGPROBS, HeadRequest
from automodel_cli.distributed.mesh_config import Layout
from automodel_cli.distributed.strategies.base import Strategy
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.training.optimizers.build import OptimizerNode


@dataclass(frozen=True)
class PlanRequest:
    """The sections of a config that a plan depends on. A microbatch is `rows` x `seq_len` tokens."""

    model: ModelConfig
    layout: Layout
    parallelizer: Strategy
    optimizer: OptimizerNode
    pipeline: PipelineConfig | None
    rows: int
    num_microbatches: int
    seq_len: int
    head: HeadRequest = LOGPROBS
    selection: Selection = EVERYTHING
    """Which parameters are trained, by patterns of names."""
    frozen: ModelConfig | None = None
    """A model beside the trained one, cut and sharded like it."""
    patches_per_image_token: float = 0.0
    """Of a model that reads pictures."""
    masks: bool = False
    """Whether attention is torch's own and reads a mask, tokens x tokens, that keeps the documents of a row apart."""
    document: int | None = None
    """Tokens of each document. None: a row is one."""
    gpu: str = "h100"
    """Of `hardware.GPUS`."""
    model_flops: Callable[[ModelPart, float, int], float | None] | None = None
    """FLOPs of a token in training: of a model, the mean length of documents and the number of trained parameters."""

    @property
    def tokens(self) -> int:
        """Of a row on one rank. Keys and values of other ranks do not count."""
        return -(-self.seq_len // self.layout.cp)

    @property
    def compute_dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.parallelizer.compute_dtype() or getattr(torch, self.model.dtype)
        return dtype

    @property
    def stages(self) -> PipelineConfig:
        """The pipeline section of a run with pipeline stages."""
        assert self.pipeline is not None
        return self.pipeline
