"""Rows of the pipeline parity matrix: what runs on every rank, and its one-process reference.

One row runs two accumulated steps with a forward-only pass between them, and returns relative errors of loss, gradient
norm, forward values and the worst gradient over all parameters. A gradient that should exist and does not is an
infinite error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.distributed.gradients import grad_norm
from automodel_cli.distributed.mesh import Mesh, build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.models.attention import packed as attention_packed
from automodel_cli.models.lm_head.detection import detect_head
from automodel_cli.models.model_part import ModelPart
from automodel_cli.pipelining.auto_pipeline import AutoPipeline
from tests.tiny import build_hf, gradient_error, gradients, packed_batch, token_row

SCHEDULES = (
    "GPipe",
    "1F1B",
    "ZB-H1",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
FAMILIES = ("llama", "qwen3", "gpt_oss", "qwen3_moe", "deepseek_v3")
KINDS = ("packed", "variable", "tied", "empty", "masked")
EMPTY_LAYOUTS = {(2, 4): "E|ttttL", (4, 4): "Et||ttt|L", (4, 8): "Etttt||tttt|L", (8, 8): "E|tt||t|ttt||tt|L"}
"""Layouts with empty stages by (stages, decoder layers): an embedding alone, pass-through stages, a head alone."""


@dataclass(frozen=True)
class Case:
    """One row. `options` are more keywords of AutoPipeline; `dp` data-parallel ranks per stage."""

    schedule: str
    family: str = "llama"
    kind: str = "packed"
    dp: int = 1
    options: tuple[tuple[str, Any], ...] = ()
    num_microbatches: int | None = None


@dataclass(frozen=True)
class Errors:
    """Relative to one process."""

    loss: float
    norm: float
    forward: float
    gradient: float

    @property
    def worst(self) -> float:
        return max(self.loss, self.norm, self.forward, self.gradient)


def whole_part(case: Case, num_layers: int) -> ModelPart:
    """The same random model on every rank and in the reference."""
    attention_packed.register_packed_attention()
    model = build_hf(case.family, num_hidden_layers=num_layers, tie_word_embeddings=case.kind == "tied")
    model.set_attn_implementation("packed")
    return ModelPart(model, detect_head(model.config), chunk_size=16)


def make_batches(case: Case, count: int, step: int, dp_rank: int) -> list[Batch]:
    """`count` microbatches of packed rows; lengths differ between microbatches and steps where the case says so."""
    batches = []
    for i in range(count):
        seed = 1000 * step + 100 * dp_rank + 10 * i
        length = 12 + 5 * ((3 * i + step) % 4) if case.kind == "variable" else 18
        rows = [[token_row(5 + i % 3, seed), token_row(length - 5 - i % 3, seed + 1)]]
        batch = packed_batch(rows)
        if case.kind == "masked":
            keep = torch.zeros_like(batch.labels_BT) if i == 1 else (batch.input_ids_BT % (2 + i % 2) == 0)
            batch = replace(batch, labels_BT=batch.labels_BT.where(keep.bool(), IGNORE_INDEX))
        batches.append(batch)
    return batches


def loss_over(weight: float) -> Callable[[Tensor, Batch], Tensor]:
    return lambda output, batch: -output.logprobs_BT.sum() / weight


def run_cases(
    rank: int, world: int, cases: Sequence[Case], sabotage: str | None = None, device: str = "cpu"
) -> list[Errors]:
    """Every case on this mesh, one after another in the same processes."""
    meshes: dict[int, Mesh] = {}
    results = []
    for case in cases:
        if case.dp not in meshes:
            config = MeshConfig(pp_size=world // case.dp, dp_size=case.dp)
            meshes[case.dp] = build_mesh(config.resolve(world), device)
        results.append(run_case(case, meshes[case.dp], sabotage))
    return results


def run_case(case: Case, mesh: Mesh, sabotage: str | None = None) -> Errors:
    """One row of the matrix on the ranks of `mesh`."""
    pp, count = mesh.layout.pp, case.num_microbatches or 2 * mesh.layout.pp
    pipeline = make_pipeline(case, mesh, count, sabotage)
    dp_rank = mesh.dp_rank
    steps = [[b.to(mesh.device) for b in make_batches(case, count, step, dp_rank)] for step in range(2)]
    everyone = [[make_batches(case, count, step, d) for d in range(case.dp)] for step in range(2)]
    weight = float(sum(b.num_label_tokens for step in everyone for batches in step for b in batches))
    loss_fn = loss_over(weight)

    losses = [pipeline.forward_backward(steps[0], loss_fn)]
    values = pipeline.forward(steps[1][:3], lambda output, batch: output.logprobs_BT.detach())
    values = [value.cpu() for value in values]
    losses.append(pipeline.forward_backward(steps[1], loss_fn))
    loss = mesh.sum_over(mesh.loss, torch.stack(losses).sum())
    norm = grad_norm(pipeline.parts, mesh)

    got = gather_gradients(pipeline.parts)
    if dist.get_rank() > 0:
        return Errors(0.0, 0.0, 0.0, 0.0)  # rank 0 compares
    want = one_process(case, num_layers(case, pp), count)
    return Errors(
        loss=abs(loss.item() - want.loss) / abs(want.loss),
        norm=abs(norm.item() - want.norm) / want.norm,
        forward=max(_relative(value, wanted) for value, wanted in zip(values, want.values, strict=True)),
        gradient=gradient_error(want.gradients, got) if set(got) <= set(want.gradients) else float("inf"),
    )


def _relative(value: Tensor, wanted: Tensor) -> float:
    return ((value - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3)).item()


@dataclass(frozen=True)
class Reference:
    loss: float
    norm: float
    values: list[Tensor]
    gradients: dict[str, Tensor]


def one_process(case: Case, layers: int, count: int) -> Reference:
    """The same two steps on the whole model, every microbatch of every data-parallel rank one after another."""
    return _one_process(case.family, case.kind, case.dp, layers, count)


@cache
def _one_process(family: str, kind: str, dp: int, layers: int, count: int) -> Reference:
    case = Case("none", family, kind, dp)
    steps = [[make_batches(case, count, step, d) for d in range(dp)] for step in range(2)]
    weight = float(sum(b.num_label_tokens for step in steps for batches in step for b in batches))
    whole, loss = whole_part(case, layers), 0.0
    for batch in (batch for step in steps for batches in step for batch in batches):
        value = loss_over(weight)(whole(labels=batch.labels_BT, **batch.model_inputs()), batch)
        value.backward()
        loss += value.item()
    grads = gradients(whole)
    with torch.no_grad():
        values = [whole(labels=b.labels_BT, **b.model_inputs()).logprobs_BT for b in steps[1][0][:3]]
    norm = torch.stack([g.norm(dtype=torch.float64) for g in grads.values()]).norm().item()
    return Reference(loss, norm, values, grads)


def num_layers(case: Case, pp: int) -> int:
    return 8 if pp == 4 else 4


def make_pipeline(case: Case, mesh: Mesh, count: int, sabotage: str | None = None) -> AutoPipeline:
    options: dict[str, Any] = dict(case.options)
    parallelize = options.pop("parallelize", None)
    layers = num_layers(case, mesh.layout.pp)
    if case.kind == "empty":
        single = case.schedule in ("GPipe", "1F1B", "ZB-H1")
        options["layout"] = EMPTY_LAYOUTS[mesh.layout.pp * (1 if single else 2), layers]
    pipeline = AutoPipeline(world_mesh=mesh, pp_schedule=case.schedule, pp_batch_size=count, **options)
    part = whole_part(case, layers).to(mesh.device)
    pipeline.build(part, parallelize_fn=PARALLELIZERS[parallelize](mesh) if parallelize else None)
    if sabotage:
        SABOTAGES[sabotage](pipeline)
    return pipeline


def gather_gradients(parts: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Gradients of all ranks by name. Copies (tied tables, data-parallel ranks) must agree, and count once."""
    own: dict[str, Tensor] = {}
    for part in parts:
        for name, grad in gradients(part).items():
            _merge(own, name, grad.cpu())
    everyone: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, own)
    merged: dict[str, Tensor] = {}
    for rank in everyone:
        for name, grad in rank.items():
            _merge(merged, name, grad)
    return merged


def _merge(into: dict[str, Tensor], name: str, grad: Tensor) -> None:
    if name in into and not torch.equal(into[name], grad):
        grad = torch.full_like(grad, float("inf"))  # two ranks would drift apart
    into[name] = grad


def _fsdp(mesh: Mesh, param_dtype: str | None = None, reduce_dtype: str | None = None) -> Callable[..., nn.Module]:
    from automodel_cli.distributed.config import FSDP2Config, MixedPrecision
    from automodel_cli.distributed.parallelizer import parallelize

    config = FSDP2Config(mp_policy=MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype))
    return lambda part, **axes: parallelize(part, mesh, config)


def _mixed(mesh: Mesh) -> Callable[..., nn.Module]:
    return _fsdp(mesh, "bfloat16", "float32")


def _layers_only(mesh: Mesh) -> Callable[..., None]:
    """FSDP on the layers alone, as expert parallelism wraps experts: the part itself is no FSDP module."""
    from torch.distributed.fsdp import fully_shard

    from automodel_cli.distributed.layer_wrapping import transformer_layers
    from automodel_cli.distributed.strategies.fsdp2.gradient_reduction import sum_gradients

    def wrap(part: nn.Module, **axes: Any) -> None:
        for layer in transformer_layers(part):
            fully_shard(layer, mesh=mesh.fsdp, reshard_after_forward=False)
        sum_gradients(part)

    return wrap


PARALLELIZERS: dict[str, Callable[[Mesh], Callable[..., Any]]] = {
    "fsdp": _fsdp,
    "layers": _layers_only,
    "mixed": _mixed,
}


def _scale_by_microbatches(pipeline: AutoPipeline) -> None:
    """What torch's scale_grads=True does."""
    original = pipeline.forward_backward

    def scaled(batches: Sequence[Batch], loss: Any) -> Tensor:
        value = original(batches, loss)
        for part in pipeline.parts:
            for param in part.parameters():
                if param.grad is not None:
                    param.grad.div_(len(batches))
        return value

    pipeline.forward_backward = scaled  # type: ignore[method-assign]


def _untied(pipeline: AutoPipeline) -> None:
    pipeline._tied_copies = list  # type: ignore[method-assign]


def _counted_twice(pipeline: AutoPipeline) -> None:
    for part in pipeline.parts:
        part.held_elsewhere = frozenset()  # type: ignore[assignment]


def _library_cleanup(pipeline: AutoPipeline) -> None:
    """torch 2.13's own clean-up at every switch between training and evaluation."""
    from torch.distributed.pipelining import PipelineStage

    for stage in pipeline.info.stages or []:
        stage._post_metadata_inference_cleanup = lambda s=stage: PipelineStage._post_metadata_inference_cleanup(s)
        begin = stage.begin

        def begin_and_clean(*args: Any, _begin: Any = begin, _stage: Any = stage) -> None:
            _begin(*args)
            _stage._post_metadata_inference_cleanup()

        stage.begin = begin_and_clean  # type: ignore[method-assign]


def _no_dp_sum(pipeline: AutoPipeline) -> None:
    object.__setattr__(pipeline._axes, "sum_groups", list)


SABOTAGES: dict[str, Callable[[AutoPipeline], None]] = {
    "scale_grads": _scale_by_microbatches,
    "untied": _untied,
    "counted_twice": _counted_twice,
    "library_cleanup": _library_cleanup,
    "no_dp_sum": _no_dp_sum,
}


def write_csv(path: Path, schedule: str, pp: int, count: int, chunks: int) -> str:
    from automodel_cli.pipelining.schedule.programs import build_program

    build_program(schedule, pp, count, chunks).to_csv(path)
    return str(path)
