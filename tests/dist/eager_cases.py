"""Rows of parity for Megatron-core's functions, called as its users call them, on real models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.data.batch import Batch
from automodel_cli.data.head_output import HeadOutput
from automodel_cli.models.model_part import ModelPart
from automodel_cli.pipelining.cut.cut_stage import cut_stage
from automodel_cli.pipelining.cut.layer_ranges import even_sizes, layer_ranges
from automodel_cli.pipelining.cut.split_check import check_split
from automodel_cli.pipelining.megatron_core.config import ModelParallelConfig, ProcessGroupCollection
from automodel_cli.pipelining.megatron_core.finalize import finalize_model_grads
from automodel_cli.pipelining.megatron_core.forward_backward import get_forward_backward_func
from tests.dist import pipeline_cases
from tests.tiny import gradient_error, gradients


@dataclass(frozen=True)
class Row:
    """One step of `m` microbatches; `v` None is not interleaved. `flags` are fields of ModelParallelConfig."""

    family: str = "llama"
    v: int | None = None
    m: int = 4
    kind: str = "packed"  # of `pipeline_cases.make_batches`
    loss: str = "mean"  # mean: 2-tuple; microbatch: 3-tuple; token: 3-tuple with calculate_per_token_loss
    flags: tuple[tuple[str, Any], ...] = field(default=())


class Chunk(nn.Module):
    """A stage with the interface that the schedule functions ask for."""

    def __init__(self, part: ModelPart, config: ModelParallelConfig, loss_kind: str):
        super().__init__()
        self.part, self.config, self.loss_kind = part, config, loss_kind

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        (self.input,) = input_tensor

    def forward(self, batch: Batch) -> HeadOutput | Tensor:
        return self.part(self.input, labels=batch.labels_BT, **batch.model_inputs())


def forward_step(iterator: Any, chunk: Chunk) -> tuple[HeadOutput | Tensor, Any]:
    batch = next(iterator)

    def loss(output: HeadOutput) -> Any:
        value, count = -output.logprobs_BT.sum(), batch.num_label_tokens
        report = {"loss": value.detach()}
        return (value / count.clamp(min=1), report) if chunk.loss_kind == "mean" else (value, count, report)

    return chunk(batch), loss


def run_rows(rank: int, world: int, rows: Sequence[Row]) -> list[float]:
    """The largest relative error of any gradient or loss, per row, against one process."""
    return [run_row(rank, world, row) for row in rows]


def run_row(rank: int, world: int, row: Row) -> float:
    case = pipeline_cases.Case("1F1B", row.family, row.kind)
    num_layers = 8 if world * (row.v or 1) > 4 else 4
    whole = pipeline_cases.whole_part(case, num_layers)
    batches = pipeline_cases.make_batches(case, row.m, 0, 0)
    chunks, stored = step(whole, batches, rank, world, row)
    losses, want = reference(whole, batches, row.loss)
    assert len(stored) == (row.m if rank == world - 1 else 0)
    got = pipeline_cases.gather_gradients([chunk.part for chunk in chunks])
    errors = [abs(s["loss"].item() - w) / max(abs(w), 1e-3) for s, w in zip(stored, losses, strict=bool(stored))]
    return max([gradient_error(want, got), *errors])


def step(
    whole: ModelPart, batches: Sequence[Batch], rank: int, world: int, row: Row, *, finalize: bool = True
) -> tuple[list[Chunk], list[Any]]:
    """One step on this rank's chunks of `whole`, and what the functions return. Not `finalize`: gradients are sums."""
    group = dist.group.WORLD
    assert group is not None
    groups = ProcessGroupCollection(pp=group)
    config = ModelParallelConfig(
        hidden_size=64,
        pipeline_dtype=torch.float32,
        virtual_pipeline_model_parallel_size=row.v,
        variable_seq_lengths=row.kind == "variable",
        calculate_per_token_loss=row.loss == "token",
        finalize_model_grads_func=(
            (lambda models, tokens: finalize_model_grads(models, tokens, pg_collection=groups)) if finalize else None
        ),
        **dict(row.flags),
    )
    chunks = make_chunks(whole, rank, world, row, config)
    rows, tokens = batches[0].shape
    stored = get_forward_backward_func(world, row.v)(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks] if row.v else iter(batches),
        model=chunks if row.v else chunks[0],
        num_microbatches=row.m,
        seq_length=rows,  # ours are [rows, tokens, hidden]; the functions only pass the three numbers on
        micro_batch_size=tokens,
        pg_collection=groups,
    )
    return chunks, stored


def make_chunks(whole: ModelPart, rank: int, world: int, row: Row, config: ModelParallelConfig) -> list[Chunk]:
    num_stages = world * (row.v or 1)
    anatomy = check_split(whole.model)
    num_layers = whole.model.config.num_hidden_layers
    layers = layer_ranges(even_sizes(num_stages, num_layers))
    chunks = []
    for stage in range(rank, num_stages, world):
        part = cut_stage(whole, anatomy, layers=layers[stage], is_first=stage == 0, is_last=stage == num_stages - 1)
        chunks.append(Chunk(part, config, row.loss))
    for part in (chunk.part for chunk in chunks):
        for param in part.parameters():
            param.grad = None
    return chunks


def reference(whole: ModelPart, batches: Sequence[Batch], kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and gradients in one process, normalised as section C4 of Megatron-core's contract says."""
    kept = {name: param.grad for name, param in whole.named_parameters()}
    for param in whole.parameters():
        param.grad = None
    total = sum(int(b.num_label_tokens) for b in batches)
    losses = []
    for batch in batches:
        value = -whole(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT.sum()
        losses.append(value.item())
        own = max(int(batch.num_label_tokens), 1) * len(batches)
        (value / (total if kind == "token" else own)).backward()
    grads = gradients(whole)
    for name, param in whole.named_parameters():  # the stages share these parameters
        param.grad = kept[name]
    return losses, grads
