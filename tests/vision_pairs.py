"""Preference pairs with pictures in packed rows, and their DPO loss by the unmodified composite, one by one."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.models.vision.front import TYPE_IDS
from automodel_cli.models.vision.probe import packed_rows
from automodel_cli.models.vision.processor import FamilyProcessor
from tests.vision import documents_of, model_of

BETA = 0.3
MICROBATCHES: tuple[tuple[tuple[int, ...], ...], ...] = (((0, 1), (2,)), ((1,), (1,)), ((3, 3), (0,)), ((2,), (0,)))
"""Pairs of each row of each microbatch. The second microbatch has no picture."""


@dataclass(frozen=True)
class PairOfDocuments:
    """Chosen and rejected ids, tokens of the prompt, and the pictures of the prompt."""

    sides: tuple[torch.Tensor, torch.Tensor]
    prompt: int
    images: list[Any]


def pairs_of(processor: FamilyProcessor) -> list[PairOfDocuments]:
    """Pairs whose prompts show 2, 0, 1 and 3 pictures. Their responses differ in length."""
    found = []
    for number, (ids_T, images) in enumerate(documents_of(processor)):
        generator = torch.Generator().manual_seed(100 + number)
        responses = [torch.randint(10, 60, (length,), generator=generator) for length in (3 + number, 5)]
        sides = torch.cat([ids_T, responses[0]]), torch.cat([ids_T, responses[1]])
        found.append(PairOfDocuments(sides, len(ids_T), images))
    return found


def reference_model(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """The composite with other weights, so that the loss of a first step is not log 2."""
    torch.manual_seed(1)
    whole = copy.deepcopy(model_of(kind, dtype))
    with torch.no_grad():
        for param in whole.parameters():
            param.add_(torch.randn_like(param, dtype=torch.float32).to(dtype) * 0.05)
    return whole


def batch_of(rows: Sequence[Sequence[int]], processor: FamilyProcessor, *, shared: bool, multiple_of: int = 1) -> Batch:
    """Return rows of pairs as a microbatch of a preference loss. `shared`: the tower reads each picture once."""
    pairs = pairs_of(processor)
    documents = [[(side, pairs[n].images) for n in row for side in pairs[n].sides] for row in rows]
    batch = packed_rows(documents, processor, multiple_of)
    labels_BT, bounds = batch.labels_BT.clone().flatten(), batch.cu_seqlens.tolist()
    chosen, document = [], 0
    for row in rows:
        for number in row:
            chosen.append(document)
            for start in bounds[document : document + 2]:
                labels_BT[start : start + pairs[number].prompt - 1] = IGNORE_INDEX
            document += 2
        document += 1  # padding
    pairs_P2 = torch.tensor([(first, first + 1) for first in chosen])
    assert batch.pictures is not None
    pictures, numbers = batch.pictures, [number for row in rows for number in row]
    if not any(pairs[number].images for number in numbers):
        ids_T, inputs = processor.blank()
        pictures = replace(pictures, inputs=inputs, blank_ids_T=ids_T)
    elif shared:
        once = list(dict.fromkeys(numbers))
        counts = [int((pairs[n].sides[0] == processor.placeholder).sum()) for n in once]
        places = dict(zip(once, torch.arange(sum(counts)).split(counts), strict=True))
        shared_P = torch.cat([places[number] for number in numbers for _ in range(2)])
        inputs = processor.inputs([image for number in once for image in pairs[number].images])
        pictures = replace(pictures, inputs=inputs, shared_P=shared_P)
    extra = {"pairs_P2": pairs_P2, "margins_P": torch.zeros(len(chosen))}
    return replace(batch, labels_BT=labels_BT.view_as(batch.labels_BT), extra=extra, pictures=pictures)


def response_logprob(
    whole: Any, ids_T: torch.Tensor, prompt: int, images: list[Any], processor: FamilyProcessor
) -> Any:
    """Return the sum of log-probs of a response, one document through the composite."""
    if hasattr(whole.base_model, "rope_deltas"):
        whole.base_model.rope_deltas = None
    given = {name: (ids_T[None] == processor.placeholder).long() for name in TYPE_IDS if name in processor.takes}
    inputs = processor.inputs(images) if images else {}
    inputs = {name: value.to(whole.dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    logits_TV = whole(input_ids=ids_T[None], **given, **inputs, use_cache=False).logits[0, prompt - 1 : -1]
    return -F.cross_entropy(logits_TV, ids_T[prompt:], reduction="sum")


def loss_of_composite(
    kind: str, processor: FamilyProcessor, dtype: torch.dtype
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean DPO loss over all pairs of all microbatches, and its gradients by the names of the composite."""
    policy, reference = model_of(kind, dtype), reference_model(kind, dtype)
    for whole in (policy, reference):
        whole.set_experts_implementation("eager")
    pairs = pairs_of(processor)
    numbers = [number for rows in MICROBATCHES for row in rows for number in row]
    total = torch.zeros((), dtype=dtype)
    for number in numbers:
        pair = pairs[number]
        ratios = []
        for ids_T in pair.sides:
            of = [response_logprob(whole, ids_T, pair.prompt, pair.images, processor) for whole in (policy, reference)]
            ratios.append(of[0] - of[1].detach())
        total = total - F.logsigmoid(BETA * (ratios[0] - ratios[1]))
    loss = total / len(numbers)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
