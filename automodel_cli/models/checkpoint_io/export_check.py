"""Comparison of an export with the trained model: log-probs with unmodified `transformers` against the model's forward.

The trained side is the forward of the model with adapters. It shares no name mapping and no merge with the export. The
reloaded export computes in fp32. The remaining difference is rounding: of weights to the dtype of the export, and of
16-bit GEMMs on the trained side. The export itself measures the size of this rounding (`_yardstick`), so the bounds do
not depend on machine, model or depth.

Example: if random rounding changes log-probs by 0.002 on average, a mean difference up to 0.006 passes. A merge with
the wrong scale differs by far more.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from automodel_cli.config.errors import RunError
from automodel_cli.models import transformers_compat
from automodel_cli.models.checkpoint_io import embedding_model, sequence_classifier
from automodel_cli.models.checkpoint_io.export_values import (
    Head,
    PictureDocument,
    Unfinished,
    values_of_documents,
    values_of_prompts,
)
from automodel_cli.models.precision.layerwise_casting import Cast, largest_forward
from automodel_cli.models.precision.stochastic_rounding import moved_within_ulp
from automodel_cli.models.score_head import EmbeddingHead

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The trained side and the yardstick round independently. Their means agree within tens of percent, their tails within a
# factor of 2. The floors are irrelevant differences. fp32 rounding is 100 times smaller.
_TIMES, _TIMES_IN_TAIL = 3.0, 4.0
_FLOOR, _FLOOR_IN_TAIL = 1e-3, 1e-2
_TAIL = 0.99
_MOST_SHARE = 1.5
_CERTAIN = 8.0  # standard errors for independent tokens. Tokens of a row are correlated.
_LOGITS_FACTOR = 3  # logits, their log-softmax, and a copy


@dataclass(frozen=True)
class Precision:
    """Compute dtype of the trained side, and whether the export rounded its weights to fewer bits."""

    arithmetic: torch.dtype
    rounds_weights: bool


@dataclass(frozen=True)
class Agreement:
    """|trained - export| over `num_values` log-probs (or scores), with the bounds of mean and tail.

    mean, tail, worst: mean, 99% quantile and maximum.
    place: (prompt, token) of the maximum.
    values: trained and exported value at `place`.
    share: fraction of the adapters' change that the export contains, 1 for a correct merge. None if rounding hides it.
    """

    mean: float
    tail: float
    worst: float
    mean_allowed: float
    tail_allowed: float
    num_values: int
    place: tuple[int, int]
    values: tuple[float, float]
    share: float | None = None

    @property
    def passed(self) -> bool:
        """Whether both bounds hold and the merge does not add more than was trained. NaN never passes.

        A share below 1 alone can be rounding: a merge loses changes below half a unit in the last place.
        """
        within = self.mean <= self.mean_allowed and self.tail <= self.tail_allowed
        return within and (self.share is None or self.share <= _MOST_SHARE)


def measure_export_error(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    trained_side: Sequence[Tensor],
    precision: Precision,
    *,
    base: Sequence[Tensor] | None = None,
    trust_remote_code: bool = False,
    score_head: Head = None,
    documents: Sequence[PictureDocument] = (),
    device: torch.device | str = "cpu",
    available_bytes: float | None = None,
    seconds: float | None = None,
) -> Agreement:
    """Compare the trained side with the export in `folder`. Runs on one rank.

    Host memory contains the export as stored and one layer in fp32. Raises RunError if the folder does not load
    completely, and `Unfinished` if memory or time does not suffice.

    Args:
        trained_side: log-probs of each prompt's tokens after the first, then those of `documents`.
        base: the same without adapters.
        score_head: compare the scores of each prompt.
        available_bytes: free host memory [bytes].
        seconds: time limit [s].
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    _check_memory(folder, available_bytes)
    model = _loaded(folder, trust_remote_code, score_head)
    where = torch.device(device)
    tokens = max([len(prompts) * max(map(len, prompts), default=0), *(len(document.ids) for document in documents)])
    if where.type == "cuda" and not _fits(where, largest_forward(model), tokens, model):
        where = torch.device("cpu")

    def values(cast: Cast) -> list[Tensor]:
        texts = values_of_prompts(model, prompts, score_head, where, cast, deadline)
        return texts + values_of_documents(model, documents, where, cast, deadline)

    exact = values(Cast(torch.float32))
    yardstick = _yardstick(model, values, precision)
    results = _agreement(_flat(trained_side), exact, yardstick)
    return (
        results if base is None else replace(results, share=_share(_flat(trained_side), _flat(base), exact, yardstick))
    )


def _yardstick(model: PreTrainedModel, values: Callable[[Cast], list[Tensor]], precision: Precision) -> list[Tensor]:
    """Run the export again with the rounding of the trained side.

    Each weight moves randomly within its unit in the last place, and GEMMs run in the dtype of the trained side.
    """
    stored = model.dtype if precision.rounds_weights else torch.float32
    keeps_float32 = transformers_compat.fp32_names(model, precision.arithmetic)
    try:
        return values(Cast(precision.arithmetic, partial(moved_within_ulp, stored=stored), keeps_float32))
    except RuntimeError:  # the model mixes dtypes in 16 bits: round only its weights
        return values(Cast(torch.float32, partial(moved_within_ulp, stored=precision.arithmetic)))


def _flat(values: Sequence[Tensor]) -> list[Tensor]:
    return [value.detach().float().cpu().reshape(-1) for value in values]


def _share(
    trained_side: Sequence[Tensor], base: Sequence[Tensor], exact: Sequence[Tensor], rounded: Sequence[Tensor]
) -> float | None:
    """Return the slope of (export - base) over (trained - base), or None if its standard error is too large.

    The error must be small enough to distinguish 1 from 1.5. A merge that adds the update twice has slope 2, but the
    noise of a single token is far larger than this difference.
    """
    trained, exported, noise = (
        torch.cat([a - b for a, b in zip(*sides, strict=True)]).double()
        for sides in ((trained_side, base), (exact, base), (rounded, exact))
    )
    square = trained.square().sum()
    error = (trained * noise).square().sum().sqrt() / square
    if not _CERTAIN * error < _MOST_SHARE - 1:  # NaN too
        return None
    return ((trained * exported).sum() / square).item()


def _agreement(trained_side: Sequence[Tensor], exact: Sequence[Tensor], rounded: Sequence[Tensor]) -> Agreement:
    num_values = sum(len(value) for value in exact)
    if not num_values:
        raise Unfinished("no prompt has two tokens")
    gaps = [_gap(a, b) for a, b in zip(trained_side, exact, strict=True)]
    gap, noise = torch.cat(gaps), torch.cat([_gap(a, b) for a, b in zip(rounded, exact, strict=True)])
    noise = noise[noise.isfinite()]
    mean, tail = (noise.mean().item(), noise.quantile(_TAIL).item()) if len(noise) else (0.0, 0.0)
    prompt = max(range(len(gaps)), key=lambda i: gaps[i].max().item() if len(gaps[i]) else -1.0)
    token = int(gaps[prompt].argmax())
    return Agreement(
        mean=gap.mean().item(),
        tail=gap.quantile(_TAIL).item() if gap.isfinite().all() else float("inf"),
        worst=gap.max().item(),
        mean_allowed=max(_FLOOR, _TIMES * mean),
        tail_allowed=max(_FLOOR_IN_TAIL, _TIMES_IN_TAIL * tail),
        num_values=num_values,
        place=(prompt, token),
        values=(trained_side[prompt][token].item(), exact[prompt][token].item()),
    )


def _gap(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b|. NaN counts as infinite."""
    return (a - b).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))


def _loaded(folder: Path, trust: bool, score_head: Head) -> PreTrainedModel:
    """Load the model with transformers in its stored dtype. Raises RunError."""
    if isinstance(score_head, EmbeddingHead):
        return embedding_model.load_embedding_model(folder)
    if score_head is not None:
        return sequence_classifier.load_classifier(folder, "auto", score_head)
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        with transformers_compat.quiet(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*`quantization_config`.*")  # as `_dequantizing` intends
            is_text_model = trust or type(AutoConfig.from_pretrained(folder)) in MODEL_FOR_CAUSAL_LM_MAPPING
            auto: Any = AutoModelForCausalLM if is_text_model else AutoModelForImageTextToText
            model, info = auto.from_pretrained(
                folder, dtype="auto", trust_remote_code=trust, output_loading_info=True, **_dequantizing(folder)
            )
    except Exception as error:  # any failure makes the export unusable
        raise RunError(
            f"export={folder} cannot be loaded with transformers: {error}", code="export_mismatch"
        ) from error
    if missing := sorted(info["missing_keys"]):
        raise RunError(
            f"export={folder} lacks {len(missing)} tensors of its model: {', '.join(missing[:3])}",
            code="export_mismatch",
        )
    loaded: PreTrainedModel = model.eval()
    return loaded


def _dequantizing(folder: Path) -> dict[str, object]:
    """Return arguments with which transformers dequantizes the weights of a quantized export."""
    if "quantization_config" not in json.loads((folder / "config.json").read_text()):
        return {}
    from transformers import CompressedTensorsConfig

    return {"quantization_config": CompressedTensorsConfig(dequantize=True)}


def _check_memory(folder: Path, available_bytes: float | None) -> None:
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    needed = host_bytes(stored)
    if available_bytes is not None and needed > available_bytes:
        raise Unfinished(
            f"the reloaded export needs {needed / 2**30:.1f} GiB of host memory, {available_bytes / 2**30:.1f} GiB are "
            "free"
        )


def host_bytes(stored: float) -> float:
    """Return the host memory of the check for an export of this size: the export, and one layer and the embeddings in
    fp32."""
    return 1.5 * stored


def _fits(device: torch.device, float32_bytes: float, tokens: int, model: PreTrainedModel) -> bool:
    """Return whether the largest layer, all modules outside layers, and the logits fit the device."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    logits = 4 * tokens * model.config.get_text_config().vocab_size * _LOGITS_FACTOR
    return bool(2 * float32_bytes + logits + 2**30 < free)
