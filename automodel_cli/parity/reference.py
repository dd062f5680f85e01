"""Reference of all layouts: the unmodified library model, eager attention, one document at a time.

It computes in float64 on the float32 weights, so that the reference adds no error of its own: in float32 it would add
5e-7.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from automodel_cli.data.batch import IGNORE_INDEX, Batch
from automodel_cli.data.head_output import HeadOutput, HeadRequest
from automodel_cli.models import transformers_compat
from automodel_cli.models.config import ModelConfig
from automodel_cli.objectives.base import Objective, request_of
from automodel_cli.objectives.denominators import with_denominators
from automodel_cli.parity import value_head as parity_value_head
from automodel_cli.parity.batches import step_batches
from automodel_cli.parity.cases import NUM_MICROBATCHES
from automodel_cli.parity.gradient_errors import full_gradients, gradient_errors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Reference:
    """Reference results of one optimizer step. `gradients` by the parameter names of the library's model.

    `rounding`: the worst relative error of the same pass in float32, one process, on this machine. 0 if not measured.
    """

    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    rounding: float = 0.0

    def of_names(self, names: Collection[str]) -> Reference:
        """Return the step that trains only these parameters. Their gradients are unchanged."""
        kept = {name: grad for name, grad in self.gradients.items() if name in names}
        norm = math.sqrt(sum(grad.double().square().sum().item() for grad in kept.values()))
        return replace(self, grad_norm=norm, gradients=kept)

    def error_of(self, other: Reference) -> float:
        """Return the worst relative error of `other`: loss, gradient norm, or any gradient over the largest one."""
        return max(
            abs(other.loss - self.loss) / abs(self.loss),
            abs(other.grad_norm - self.grad_norm) / self.grad_norm,
            *gradient_errors(self.gradients, other.gradients).values(),
        )


Given = Callable[[Batch, int, Tensor], dict[str, Any]]
"""Further keywords of the model for a document: batch, number of the document, ids `[1, T]`."""


def _nothing(batch: Batch, number: int, ids_BT: Tensor) -> dict[str, object]:
    return {}


def one_process(
    model: PreTrainedModel, batches: Sequence[Batch], objective: Objective, given: Given = _nothing
) -> Reference:
    """Run every document separately through `model`, using nothing of this package except the objective.

    Microbatches are summed in float64, so that the difference is the error of the other side.
    """
    total, batches = with_denominators(objective, batches)
    weight = float(total)
    request = request_of(objective)
    head = None
    if request.values or request.scores:
        head = parity_value_head.reference_head(model.config.get_text_config().hidden_size, request.scores or 1)
    loss = 0.0
    sums: dict[str, Tensor] = {}
    for batch in batches:
        model.zero_grad()
        value = objective(_output(model, batch, request, head, given), batch) / weight
        value.backward()
        loss += value.item()
        gradients = full_gradients([model])
        if head is not None:
            gradients |= {f"{parity_value_head.NAME}.{name}": grad for name, grad in full_gradients([head]).items()}
            head.zero_grad()
        for name, grad in gradients.items():
            # One backward per microbatch, with float64 sums: accumulation in `.grad` would round in float32.
            sums[name] = sums.get(name, torch.zeros(())) + grad.double()
    norm = torch.stack([grad.square().sum() for grad in sums.values()]).sum().sqrt()
    return Reference(loss, norm.item(), {name: grad.float() for name, grad in sums.items()})


def exact_process(
    model: PreTrainedModel, batches: Sequence[Batch], objective: Objective, given: Given = _nothing
) -> Reference:
    """Run one process in float64 on the float32 weights of `model`, and measure its float32 pass against it.

    How float32 sums round depends on the processor: on the width of its vectors and the order of its additions. A test
    bounds errors in multiples of `rounding`, which was measured on the same processor.
    """
    model.set_experts_implementation("eager")  # a loop over experts; the grouped implementation has no float64
    own = one_process(model, batches, objective, given)
    # The same weights, so the difference to float32 is rounding alone.
    exact = one_process(model.double(), batches, objective, given)
    model.float()  # restore the weights
    return replace(exact, rounding=exact.error_of(own))


def _output(
    model: PreTrainedModel, batch: Batch, request: HeadRequest, value_head: nn.Linear | None, given: Given
) -> HeadOutput:
    ids_N, labels_N = batch.input_ids_BT.flatten(), batch.labels_BT.flatten()
    asked_NK = None if request.token_ids is None else batch.extra[request.token_ids].flatten(0, 1)
    outputs = []
    pristine = {name: copy.deepcopy(module) for name, module in model.named_modules() if hasattr(module, "rope_type")}
    for number, (start, end) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        for name, module in pristine.items():  # some rotary tables store the longest document that they saw
            model.set_submodule(name, copy.deepcopy(module))
        # one document: (1, T) ids -> (T, V) logits -> (T,) values of its labels
        ids_BT = ids_N[None, start:end]
        inputs = {"input_ids": ids_BT, "use_cache": False, **given(batch, number, ids_BT)}
        logits_TV = model(**inputs).logits[0]
        asked_TK = None if asked_NK is None else asked_NK[start:end]
        output = output_of(logits_TV, labels_N[start:end], request, asked_TK)
        if value_head is not None:
            hidden_TD = model.base_model(**inputs)[0][0]
            scores_TL = value_head(hidden_TD.to(value_head.weight.dtype))
            output = output._replace(
                values_BT=scores_TL[:, 0] if request.values else None,
                scores_BTL=scores_TL if request.scores else None,
            )
        outputs.append(output)
    fields: Any = (
        None if of_documents[0] is None else torch.cat(of_documents).unflatten(0, batch.shape)
        for of_documents in zip(*outputs, strict=True)
    )
    return HeadOutput(*fields)


def reference_logprobs(logits_TV: Tensor, labels_T: Tensor) -> Tensor:
    """Return the log-prob of each label in fp32 or better, 0 for ignored labels, by the plain definition."""
    logprobs_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)).log_softmax(-1)
    picked_T = logprobs_TV.gather(-1, labels_T.clamp(min=0)[..., None])[..., 0]
    return picked_T.masked_fill(labels_T == IGNORE_INDEX, 0.0)


def output_of(
    logits_TV: Tensor, labels_T: Tensor, request: HeadRequest, token_ids_TN: Tensor | None = None
) -> HeadOutput:
    """Compute `HeadOutput` of tokens `[T, ...]` by its definition, from full logits, in fp32 or better."""
    logprobs_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)).log_softmax(-1)
    ignored_T = labels_T == IGNORE_INDEX
    entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1).masked_fill(ignored_T, 0.0)
    topk = logprobs_TV.topk(request.topk)
    given = None
    if token_ids_TN is not None:
        absent_TN = (token_ids_TN < 0) | ignored_T[:, None]
        given = logprobs_TV.gather(-1, token_ids_TN.clamp(min=0)).masked_fill(absent_TN, 0.0)
    return HeadOutput(
        reference_logprobs(logits_TV, labels_T),
        entropy_BT=entropy_T if request.entropy else None,
        topk_logprobs_BTK=topk.values.masked_fill(ignored_T[:, None], 0.0) if request.topk else None,
        topk_ids_BTK=topk.indices.masked_fill(ignored_T[:, None], 0) if request.topk else None,
        token_logprobs_BTN=given,
        lse_BT=logits_TV.to(logprobs_TV.dtype).logsumexp(-1).masked_fill(ignored_T, 0.0) if request.lse else None,
    )


@dataclass(frozen=True)
class Original:
    """A model saved by transformers, and its results in one process, packed and unpacked.

    Ranks receive the folder, which they load like any checkpoint, and the expected results.
    """

    folder: Path
    attention: str = "packed"
    trust_remote_code: bool = False

    @classmethod
    def write(
        cls,
        folder: Path,
        model: PreTrainedModel,
        objective: Objective,
        *,
        kinds: Sequence[bool] = (True, False),
        counts: Sequence[int] = (NUM_MICROBATCHES,),
        attention: str = "packed",
        trust_remote_code: bool = False,
    ) -> Original:
        """Save `model` (fp32, eager attention, train mode), then measure it in float64 on steps of these kinds
        (`packed`) and numbers of microbatches."""
        with transformers_compat.quiet():
            model.save_pretrained(folder)
        scores = request_of(objective).scores
        for packed, count in product(kinds, counts):
            reference = exact_process(model, step_batches(packed=packed, count=count, num_outputs=scores), objective)
            torch.save(vars(reference), cls._path(folder, packed, count))
        return cls(folder, attention, trust_remote_code)

    def reference(self, *, packed: bool, count: int = NUM_MICROBATCHES) -> Reference:
        return Reference(**torch.load(self._path(self.folder, packed, count), mmap=True))

    def model_config(self) -> ModelConfig:
        """Use head chunks of a few tokens, so that chunks end inside sequences."""
        return ModelConfig(
            pretrained=str(self.folder),
            attn_implementation=self.attention,
            trust_remote_code=self.trust_remote_code,
            lm_head_chunk_size=16,
        )

    @staticmethod
    def _path(folder: Path, packed: bool, count: int) -> Path:
        return folder / f"reference-{'packed' if packed else 'padded'}-{count}.pt"
