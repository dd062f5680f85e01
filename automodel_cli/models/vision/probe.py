"""Picture probe: does a packed row with pictures give what the unmodified composite gives for each document alone?

Measured on a small copy of the config with the real image processor. Everything that has to do with pixels is kept.
Widths, depths and the vocabulary are small. Runs before anything is built.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import IGNORE_INDEX, Batch, Pictures
from automodel_cli.models import transformers_compat
from automodel_cli.models.attention.picture_runs import TwoWay
from automodel_cli.models.builder import part_of
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.document_masking import recurrent_layers
from automodel_cli.models.hub import composite_text
from automodel_cli.models.hub.multimodal_backbone import text_config
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.probes.small_sizes import VOCAB
from automodel_cli.models.vision import two_way
from automodel_cli.models.vision.front import Front
from automodel_cli.models.vision.processor import FamilyProcessor
from automodel_cli.models.vision.small import shared_copy

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_PICTURES = (((40, 56),), (), ((56, 40), (40, 40)))
"""Height and width of the pictures of each document."""
_TOLERANCE = 1e-3  # relative. float32; leaks and wrong positions are at least 1e-2.
_reasons: dict[tuple[type, str, str], str] = {}


def probe_pictures(composite_config: PretrainedConfig, processor: FamilyProcessor) -> None:
    """Raise ConfigError if packed documents with pictures differ from the composite's own forward. Cached."""
    key = (type(composite_config), composite_config.to_json_string(), processor.cache_key())
    if key not in _reasons:
        _reasons[key] = _reason(composite_config, processor)
    if reason := _reasons[key]:
        raise ConfigError(
            f"pictures are not supported for {composite_config.model_type} because {reason}",
            code="not_supported_by_model",
            keys=("model.vision",),
            fix="model.vision=null, which trains the text model alone with a recipe of kind sft",
        )


def _reason(config: PretrainedConfig, processor: FamilyProcessor) -> str:
    """Return why pictures are not supported, or an empty string."""
    try:
        with transformers_compat.quiet():
            whole = shared_copy(config)
            try:
                return _difference(whole, processor.resized(whole.config))
            finally:
                forget_state(whole)
    except ConfigError as error:
        return error.message
    except Exception as error:  # any class of the library may fail in its own way on small sizes
        return f"a small copy of the model does not run ({type(error).__name__}: {error})".splitlines()[0][:300]


def _difference(whole: PreTrainedModel, processor: FamilyProcessor) -> str:
    part = small_part(whole).eval()
    if recurrent_layers.runs_by_document(part.model):
        return "its attention runs document by document"
    documents = documents_with_pictures(processor)
    if reason := _why_other_mask(whole, documents[-1], processor, part.two_way):
        return reason
    batch = probe_rows(processor)
    want, want_gradients = _one_by_one(whole, documents, processor)
    output = part(**batch.head_inputs(), **batch.model_inputs()).logprobs_BT
    got = output[batch.labels_BT != IGNORE_INDEX]
    got.sum().backward()
    got = got.detach()
    front = part.front
    assert front is not None
    gap = float((got - want).abs().max() / want.abs().max())
    if not gap <= _TOLERANCE:
        return f"packed documents with pictures have other log-probs (relative difference {gap:.1e})"
    largest = max(float(gradient.abs().max()) for gradient in want_gradients.values())
    for name, param in front.composite.named_parameters():
        gradient = want_gradients.get(name)
        if gradient is None:
            continue
        if param.grad is None or not float((param.grad - gradient).abs().max()) <= _TOLERANCE * largest:
            return f"packed documents with pictures give {name} another gradient"
    return ""


def probe_rows(processor: FamilyProcessor) -> Batch:
    """Return two packed rows with pictures, for a small copy."""
    documents = documents_with_pictures(processor)
    return packed_rows([documents[:2], documents[2:]], processor)


def small_part(whole: PreTrainedModel, attention: str = "packed") -> ModelPart:
    """Return a part with the weights of a composite in memory."""
    dtype: Any = str(whole.dtype).removeprefix("torch.")
    choice = ModelConfig(pretrained="-", attn_implementation=attention, dtype=dtype)
    part = part_of(text_config(copy.deepcopy(whole.config)), choice, device="cpu")
    name = composite_text.text_module(whole)
    assert name is not None
    _fill(part.model.base_model, whole.get_submodule(name))
    _fill(part.model.get_output_embeddings(), whole.get_output_embeddings())
    part.add_front(Front(copy.deepcopy(whole), part.model.base_model))
    part.two_way = two_way.rules_of(whole)
    return part


@torch.no_grad()
def _fill(model: nn.Module, other: nn.Module) -> None:
    """Copy the weights of another model."""
    state = other.state_dict()
    for name, tensor in model.state_dict().items():
        tensor.copy_(state[name])


def documents_with_pictures(processor: FamilyProcessor) -> list[tuple[Tensor, list[object]]]:
    """Return documents (ids, pictures) with 1, 0 and 2 pictures."""
    return [_document(processor, sizes, seed) for seed, sizes in enumerate(_PICTURES)]


def _document(processor: FamilyProcessor, sizes: tuple[tuple[int, int], ...], seed: int) -> tuple[Tensor, list[Any]]:
    """Return ids `[T]` and pictures of a document: text around each picture."""
    from PIL import Image

    rng = np.random.default_rng(seed)
    pieces, images = [rng.integers(3, VOCAB // 2, 5)], []
    for height, width in sizes:
        run = processor.replacement(height, width).astype(np.int64)
        is_placeholder = run == processor.original_placeholder
        pieces += [np.where(is_placeholder, processor.placeholder, 3 + run % (VOCAB // 2)), rng.integers(3, 80, 4)]
        images.append(Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)))
    return torch.from_numpy(np.concatenate(pieces)), images


def _why_other_mask(
    whole: PreTrainedModel, document: tuple[Tensor, list[object]], processor: FamilyProcessor, rules: TwoWay | None
) -> str:
    """Return why the masks that the composite makes for its text model are not supported, or an empty string."""
    eager = copy.deepcopy(whole)
    eager.set_attn_implementation("eager")
    front = Front(eager, eager.get_submodule(str(composite_text.text_module(eager))))
    batch = packed_rows([[document]], processor)
    assert batch.pictures is not None
    tokens = len(document[0])
    ids_BT = batch.input_ids_BT[:, :tokens]
    masks = front.masks(ids_BT, _cut(batch.pictures, tokens))
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    window = getattr(whole.config.get_text_config(), "sliding_window", None)
    for kind, mask in masks.items() if isinstance(masks, dict) else [("", masks)]:
        if isinstance(mask, Tensor) and mask.ndim == 4:
            sees = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0
            is_sliding = "sliding" in kind
            rule = "causal" if rules is None else rules.sliding if is_sliding else rules.full
            known = two_way.visible_by(rule, ids_BT == processor.placeholder, window if is_sliding else None)
            if (sees & future).any() and not torch.equal(sees, known):
                return "the attention masks of its text model are neither causal nor two-way inside pictures"
    return ""


def _cut(pictures: Pictures, tokens: int) -> Pictures:
    positions = pictures.positions_3BT
    return replace(pictures, positions_3BT=None if positions is None else positions[..., :tokens])


def packed_rows(rows: list[list[tuple[Tensor, list[Any]]]], processor: FamilyProcessor, multiple_of: int = 1) -> Batch:
    """Return documents (ids, pictures) packed into rows of equal length, with padding at their end."""
    length = max(sum(len(ids) for ids, _ in row) for row in rows) + 1
    length += -length % multiple_of
    ids_BT = torch.zeros(len(rows), length, dtype=torch.int64)
    labels_BT, positions_BT = torch.full_like(ids_BT, IGNORE_INDEX), torch.zeros_like(ids_BT)
    images = [image for row in rows for _, of_document in row for image in of_document]
    inputs = processor.inputs(images) if images else {}
    grid, bounds = [], [0]
    for number, row in enumerate(rows):
        start = 0
        for ids_T, of_document in [*row, (torch.zeros(0, dtype=torch.int64), [])]:
            stop = start + len(ids_T) if len(ids_T) else length
            ids_BT[number, start : start + len(ids_T)] = ids_T
            labels_BT[number, start : start + max(0, len(ids_T) - 1)] = ids_T[1:]
            positions_BT[number, start:stop] = torch.arange(stop - start)
            grid_N3 = torch.tensor([processor.grid(image.height, image.width) for image in of_document])
            found = processor.positions(ids_T, grid_N3) if of_document else None
            grid.append(torch.arange(stop - start).expand(3, -1) if found is None else found)
            start = stop
            bounds.append(number * length + stop)
    labels_BT[labels_BT == processor.placeholder] = IGNORE_INDEX
    positions = torch.cat(grid, 1).view(3, *ids_BT.shape) if processor.has_grid else None
    return Batch(
        input_ids_BT=ids_BT,
        labels_BT=labels_BT,
        position_ids_BT=positions_BT,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        max_seqlen=max(b - a for a, b in itertools.pairwise(bounds)),
        row_ids_B=torch.arange(len(rows)),
        pictures=Pictures(inputs, processor.placeholder, positions),
    )


def forget_state(whole: PreTrainedModel, *, gradients: bool = True) -> None:
    """Remove what a forward leaves behind in a composite."""
    transformers_compat.forget_positions(whole)
    if gradients:
        whole.zero_grad()


def inputs_of_document(
    whole: PreTrainedModel, ids_BT: Tensor, images: list[object], processor: FamilyProcessor
) -> dict[str, Tensor]:
    """Return the keywords of a composite for one document, beside its ids. The state of the last one is removed."""
    forget_state(whole, gradients=False)
    given = processor.keywords(ids_BT, images)
    return {name: x.to(whole.dtype) if x.is_floating_point() else x for name, x in given.items()}


def _one_by_one(
    whole: PreTrainedModel, documents: list[tuple[Tensor, list[object]]], processor: FamilyProcessor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the log-probs of labels under the composite, and gradients of their sum, by its parameter names."""
    values = []
    for ids_T, images in documents:
        ids_BT = ids_T[None]
        given = inputs_of_document(whole, ids_BT, images, processor)
        logits_TV = whole(input_ids=ids_BT, **given, use_cache=False).logits[0, :-1]
        logprobs_T = logits_TV.log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0]
        values.append(logprobs_T[ids_T[1:] != processor.placeholder])
    found = torch.cat(values)
    found.sum().backward()
    return found.detach(), {n: p.grad for n, p in whole.named_parameters() if p.grad is not None}
