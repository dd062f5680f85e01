"""Comparison of layouts with one process for runs with pictures. Used by `automodel verify`.

The reference is the unmodified composite in float64, one document at a time. Every rank builds the same small copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.models.attention.packed import register_packed_attention
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.freezing import freeze, freeze_by_vision
from automodel_cli.models.hub import source
from automodel_cli.models.lora import front as lora_front
from automodel_cli.models.model_part import ModelPart, model_parts
from automodel_cli.models.vision.probe import documents_with_pictures, inputs_of_document, packed_rows, small_part
from automodel_cli.models.vision.processor import FamilyProcessor, shared_processor
from automodel_cli.models.vision.small import build_composite, small_composite
from automodel_cli.objectives.base import Objective
from automodel_cli.parity import lora_reference
from automodel_cli.parity.batches import columns
from automodel_cli.parity.cases import NUM_MICROBATCHES, Case
from automodel_cli.parity.compare import Errors, GradientRecorder, Refused, step_errors
from automodel_cli.parity.reference import Reference, exact_process
from automodel_cli.pipelining.build_stages import build_stages
from automodel_cli.pipelining.cut.picture_split import layers_of_first_stage
from automodel_cli.training.step import train_step

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ALIGNMENT = 2
"""Divides the length of rows: routers count the padding of sequence parallelism."""


@dataclass(frozen=True)
class PictureOriginal:
    """The small copy of a composite, and its results in one process."""

    model: ModelConfig
    folder: Path
    num_layers: int

    @classmethod
    def write(
        cls, folder: Path, model: ModelConfig, num_layers: int, objective: Objective, kinds: Sequence[bool]
    ) -> PictureOriginal:
        """Measure the composite in float64, on packed rows, rows of one document, or both."""
        original = cls(model, folder, num_layers)
        register_packed_attention()
        folder.mkdir()
        whole = original.composite()
        processor = shared_processor(model).resized(whole.config)
        names = _Names(small_part(whole))
        for packed in kinds:
            batches, shown = step_batches(processor, packed=packed)
            whole = original.composite()
            found = exact_process(whole, batches, objective, _Given(whole, processor, shown))
            gradients = {names.of_part(name): grad for name, grad in found.gradients.items()}
            torch.save(vars(replace(found, gradients=gradients)), original.path(packed=packed))
        return original

    def composite(self) -> Any:
        """Return the small copy with the same weights in every process."""
        return build_composite(small_composite(source.composite_config(self.model), num_layers=self.num_layers))

    def names(self) -> set[str]:
        """Return the names of all parameters, as runs show them."""
        part = small_part(self.composite())
        return {part.hub_name(name) for name, _ in part.named_parameters(remove_duplicate=False)}

    def path(self, *, packed: bool) -> Path:
        return self.folder / f"reference-{'packed' if packed else 'padded'}.pt"

    def reference(self, *, packed: bool) -> Reference:
        return Reference(**torch.load(self.path(packed=packed), mmap=True))


class _Names:
    """Names of a text model's parameters inside the composite and alone."""

    def __init__(self, part: ModelPart):
        front, model = part.front, part.model
        assert front is not None
        head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
        self.prefixes = {f"{front.text_name}.": f"{model.base_model_prefix}.", f"{front.head_name}.": f"{head}."}

    def of_part(self, name: str) -> str:
        """Return the name in the part for a name in the composite."""
        prefix = next((prefix for prefix in self.prefixes if name.startswith(prefix)), None)
        return name if prefix is None else self.prefixes[prefix] + name.removeprefix(prefix)


class _Given:
    """Keywords of the composite for a document of a batch, beside its ids."""

    def __init__(self, whole: PreTrainedModel, processor: FamilyProcessor, shown: Sequence[Sequence[list[object]]]):
        self.whole, self.processor, self.shown = whole, processor, shown

    def __call__(self, batch: Batch, number: int, ids_BT: Tensor) -> dict[str, Any]:
        of_batch = self.shown[int(batch.row_ids_B[0]) // len(batch.row_ids_B)]
        return inputs_of_document(self.whole, ids_BT, of_batch[number], self.processor)


def step_batches(processor: FamilyProcessor, *, packed: bool) -> tuple[list[Batch], list[list[list[object]]]]:
    """Return the microbatches of a step, and the pictures of their documents, the document of padding included.

    Microbatches 1 and 5 have no picture. Ranks of data parallelism then differ in whether they have one.
    """
    shown_once, without, shown_twice = documents_with_pictures(processor)
    batches, shown = [], []
    for index in range(NUM_MICROBATCHES):
        documents = [shown_once, without, shown_twice] if index % 2 else [shown_twice, without]
        rows = [documents[:2], documents[2:] or [shown_once]]
        if index % 4 == 1:
            rows = [[without, without], [without]]
        if not packed:
            rows = [[row[0]] for row in rows]
        batch = packed_rows(rows, processor, _ALIGNMENT)
        if not any(images for row in rows for _, images in row):
            assert batch.pictures is not None
            ids_T, inputs = processor.blank()
            blank_ids_T = torch.where(ids_T == processor.original_placeholder, processor.placeholder, 0)
            batch = replace(batch, pictures=replace(batch.pictures, inputs=inputs, blank_ids_T=blank_ids_T))
        labels_BT = batch.labels_BT.clone()
        labels_BT[:, :index] = IGNORE_INDEX  # ranks have different numbers of labels
        batch = replace(batch, labels_BT=labels_BT, row_ids_B=torch.arange(len(rows)) + len(rows) * index)
        batches.append(replace(batch, extra=columns(batch, seed=index)))
        shown.append([images for row in rows for _, images in [*row, (None, [])]])
    return batches, shown


def run_picture_rows(rank: int, world: int, original: PictureOriginal, rows: Sequence[Case]) -> list[Errors | Refused]:
    """Run every case on these ranks in order. The list of rank 0 is the result."""
    register_packed_attention()
    return [_run_row(original, row) for row in rows]


def _run_row(original: PictureOriginal, row: Case) -> Errors | Refused:
    try:
        mesh = build_mesh(row.mesh.resolve(dist.get_world_size()), "cpu")
        whole, processor = original.composite(), shared_processor(original.model)
        part = _trained_part(whole, original.model, row)
        batches, _ = step_batches(processor.resized(whole.config), packed=row.packed)
        count = len(batches) // mesh.dp_size
        trained = {part.hub_name(name) for name, param in part.named_parameters() if param.requires_grad}
        stages = build_stages(
            part,
            mesh,
            row.pipeline,
            row.parallelizer,
            num_microbatches=count,
            picture_layers=lambda: layers_of_first_stage(source.composite_config(original.model), processor),
        )
    except ConfigError as error:
        return Refused(str(error))
    expected = original.reference(packed=row.packed)
    if row.lora is not None:
        adapters = lora_reference.put_in(model_parts(stages.parts))
        expected = lora_reference.reference_of(expected, adapters, trained)
    else:
        expected = expected.of_names(trained)
    recorder = GradientRecorder(*stages.parts)
    mine = batches[mesh.dp_rank * count :][:count]
    result = train_step(stages, mine, row.objective, recorder, mesh, max_grad_norm=None)
    # Some towers have layers after the one whose features are used, which have no gradient in one process.
    known = {name: grad for name, grad in recorder.gradients.items() if name in expected.gradients or bool(grad.any())}
    return step_errors(expected, result, known)


def _trained_part(whole: PreTrainedModel, model: ModelConfig, row: Case) -> ModelPart:
    """Return the part of a case, with the weights of the composite and equal adapters on every rank."""
    torch.manual_seed(0)
    part = small_part(whole).train()
    assert model.vision is not None, "the recipe reads pictures"
    freeze_by_vision(part, model.vision)
    if row.lora is not None:
        lora_front.inject(part, row.lora, model.vision)
    generator = torch.Generator().manual_seed(1)
    for name, param in part.named_parameters():
        if "lora_A" in name:
            nn.init.normal_(param, std=0.1, generator=generator)
        elif "lora_B" in name:
            nn.init.zeros_(param)
    freeze(part, row.selection)
    return part
