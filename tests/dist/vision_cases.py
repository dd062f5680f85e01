"""Rows with pictures under layouts, against the unmodified composite in one process, document by document."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import peft
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.strategies.base import Strategy
from automodel_cli.models.attention.packed import register_packed_attention
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.front_io import fill_front
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora import front as lora_front
from automodel_cli.models.lora.adapters import low_rank_layers
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.model_part import ModelPart, model_parts
from automodel_cli.models.rng import generator_for
from automodel_cli.models.vision.config import VisionConfig
from automodel_cli.models.vision.front import TYPE_IDS
from automodel_cli.models.vision.probe import packed_rows, small_part
from automodel_cli.models.vision.processor import FamilyProcessor
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.cases import FP32
from automodel_cli.parity.compare import Errors, GradientRecorder, step_errors
from automodel_cli.parity.gradient_errors import full
from automodel_cli.parity.reference import Reference
from automodel_cli.pipelining.build_stages import build_stages
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.pipelining.cut.picture_split import layers_of_first_stage
from automodel_cli.training.step import train_step
from tests.vision import config_of, documents_of, model_of, processor_of

NUM_MICROBATCHES = 4


@dataclass(frozen=True)
class Case:
    """One layout."""

    mesh: MeshConfig = field(default_factory=MeshConfig)
    parallelizer: Strategy = field(default_factory=lambda: FSDP2Config(mp_policy=FP32))
    pipeline: PipelineConfig | None = None
    lora: LoRAConfig | None = None
    """Adapters on tower, projector and text model."""
    text_is_frozen: bool = False


def microbatches(processor: FamilyProcessor, multiple_of: int) -> list[Batch]:
    """Packed rows with several pictures, with one, and without any, of different lengths."""
    a, b, c, d = documents_of(processor)
    rows = [[[a, b], [c, d]], [[b, b]], [[c, b]], [[d], [a, c]]]
    batches = [packed_rows(of_batch, processor, multiple_of) for of_batch in rows]
    ids_T, inputs = processor.blank()
    assert batches[1].pictures is not None
    blank = replace(batches[1].pictures, inputs=inputs, blank_ids_T=ids_T)
    batches[1] = replace(batches[1], pictures=blank)
    return batches


def reference(kind: str, dtype: torch.dtype = torch.float64, case: Case | None = None) -> Reference:
    """Loss and gradients of one step, by the names of the composite.

    Of `case`, only what is trained counts: its adapters are those of `peft` on the composite.
    """
    whole = model_of(kind)
    if case is not None and case.lora is not None:
        lora = case.lora
        settings = peft.LoraConfig(r=lora.rank, lora_alpha=int(lora.alpha), target_modules=lora.target_modules)
        peft.inject_adapter_in_model(settings, whole)
        _fill_adapters(whole.named_parameters())
    if case is not None and case.text_is_frozen:
        whole.base_model.language_model.requires_grad_(False)
        whole.get_output_embeddings().requires_grad_(False)
    processor = FamilyProcessor(processor_of(kind), whole.config)
    whole.set_experts_implementation("eager")
    whole = whole.to(dtype)
    a, b, c, d = documents_of(processor)
    total, count = torch.zeros((), dtype=dtype), 0
    for ids_T, images in (a, b, c, d, b, b, c, b, d, a, c):
        if hasattr(whole.base_model, "rope_deltas"):
            whole.base_model.rope_deltas = None
        given = {name: (ids_T[None] == 2).long() for name in TYPE_IDS if name in processor.takes}
        inputs = processor.inputs(images) if images else {}
        inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
        labels_T = ids_T[1:].masked_fill(ids_T[1:] == 2, IGNORE_INDEX)
        logits_TV = whole(input_ids=ids_T[None], **given, **inputs, use_cache=False).logits[0, :-1]
        total = total + F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORE_INDEX, reduction="sum")
        count += int((labels_T != IGNORE_INDEX).sum())
    (total / count).backward()
    gradients = {n: p.grad.double() for n, p in whole.named_parameters() if p.grad is not None}
    norm = torch.stack([grad.square().sum() for grad in gradients.values()]).sum().sqrt()
    return Reference((total / count).item(), norm.item(), {name: grad.float() for name, grad in gradients.items()})


@torch.no_grad()
def _fill_adapters(named: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Set both matrices of all adapters to random values, by the names of the composite."""
    for name, param in named:
        if "lora_" in name:
            param.copy_(torch.randn(param.shape, generator=generator_for(0, name)) * 0.2)


def _composite_name(name: str, part: ModelPart) -> str:
    front, hub_name = part.front, part.hub_name(name)
    assert front is not None
    if name.startswith("front."):
        return hub_name
    return f"{front.text_name}." + hub_name.removeprefix("model.")


def compare(
    rank: int, world: int, kind: str, cases: Sequence[Case], sabotage: Callable[[], None] | None = None
) -> list[Errors]:
    """Run one step of each case on these ranks. Rank 0 returns the verdict. All cases train the same parameters."""
    register_packed_attention()
    exact = reference(kind, case=cases[0])
    expected = replace(exact, rounding=exact.error_of(reference(kind, torch.float32, cases[0])))
    if sabotage is not None:
        sabotage()
    return [_errors(kind, case, expected, world) for case in cases]


def _errors(kind: str, case: Case, expected: Reference, world: int) -> Errors:
    whole = model_of(kind)
    processor = FamilyProcessor(processor_of(kind), config_of(kind))
    part = small_part(whole)
    if case.lora is not None:
        lora_front.inject(part, case.lora, VisionConfig(tower="adapters", projector="adapters"))
        _fill_adapters((_composite_name(name, part), param) for name, param in part.named_parameters())
    if case.text_is_frozen:
        part.model.requires_grad_(False)
    mesh = build_mesh(case.mesh.resolve(world), "cpu")
    # Routers count the padding of sequence parallelism, so their tokens must divide.
    batches = microbatches(processor, 2 if kind.endswith("moe") else 1)
    count = len(batches) // mesh.dp_size
    mine = batches[mesh.dp_rank * count :][:count]
    stages = build_stages(
        part.train(),
        mesh,
        case.pipeline,
        case.parallelizer,
        num_microbatches=count,
        picture_layers=lambda: layers_of_first_stage(config_of(kind), processor),
    )
    recorder = GradientRecorder(*stages.parts)
    result = train_step(stages, mine, SFT(), recorder, mesh, max_grad_norm=None)
    return step_errors(expected, result, by_composite_names(recorder.gradients, part, expected))


def by_composite_names(gradients: dict[str, Tensor], part: ModelPart, expected: Reference) -> dict[str, Tensor]:
    """Return gradients by the names of the composite. `part`: of the complete model."""
    front = part.front
    assert front is not None
    names = {"model.": f"{front.text_name}.", "lm_head.": f"{front.head_name}."}
    got = {}
    for name, grad in gradients.items():
        prefix = next((p for p in names if name.startswith(p) and name not in expected.gradients), None)
        got[name if prefix is None else names[prefix] + name.removeprefix(prefix)] = grad
    return {name: grad for name, grad in got.items() if name in expected.gradients or bool(grad.any())}


def decomposition_error(rank: int, world: int, folder: str) -> float:
    """Load a model with PiSSA adapters on tower and text, in two stages. Rank 0 returns how much its updates differ
    from the largest singular directions of the weights, relative to the largest value."""
    lora = LoRAConfig(rank=2, alpha=4.0, init_lora_weights="pissa")
    config = ModelConfig(pretrained=folder, vision=VisionConfig(tower="adapters"), lora=lora)
    mesh = build_mesh(MeshConfig(pp_size=2).resolve(world), "cpu")
    stages = build_stages(build_part(config), mesh, PipelineConfig(), FSDP2Config(mp_policy=FP32), num_microbatches=2)
    worst = 0.0
    for part in model_parts(stages.parts):
        load_weights(part, config, device="cpu", seed=0)
        fill_front(part, config, buffer_device=mesh.device, seed=0)
        layers = dict(pair for model in part.models for pair in low_rank_layers(model))
        assert part.front is None or any(".vision_tower." in f".{name}" for name in layers)
        for layer in layers.values():
            u, values, v = torch.linalg.svd(full(layer.get_base_layer().weight).detach().double())
            a, b = (full(getattr(layer, f"lora_{matrix}")["default"].weight).detach().double() for matrix in "AB")
            difference = (u[:, :2] * values[:2]) @ v[:2] - layer.scaling["default"] * b @ a
            worst = max(worst, float(difference.abs().max() / values[0]))
    return worst
