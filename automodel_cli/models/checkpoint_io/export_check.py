"""Whether an export computes what was trained: its log-probs under stock `transformers` beside those of the model.

The trained side is the model's own forward, adapters on. It shares no name lookup and no merge with the export. The
library reloads the export, which computes in float32. What then remains is rounding: of weights to the dtype of the
export, and of products where the trained side computes in 16 bits. The export itself measures how much that costs
(`_yardstick`), so no bound depends on the machine, the model or its depth.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from automodel_cli.config.errors import RunError
from automodel_cli.models import transformers_compat
from automodel_cli.models.checkpoint_io import sequence_classifier
from automodel_cli.models.layerwise_casting import Cast, cast_layers, largest_forward
from automodel_cli.models.stochastic_rounding import moved_within_ulp

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# The trained side and the yardstick round independently. Their means agree within tens of percent, their tails within a
# factor of 2. The floors are differences that nobody notices: float32 stays 100 times below them.
_TIMES, _TIMES_IN_TAIL = 3.0, 4.0
_FLOOR, _FLOOR_IN_TAIL = 1e-3, 1e-2
_TAIL = 0.99
_MOST_SHARE = 1.5
_CERTAIN = 8.0  # standard errors of independent tokens: those of a row are not
_LOGITS_FACTOR = 3  # logits, their log-softmax, and a copy


class Unfinished(Exception):
    """The comparison does not fit the memory or the time. The message is the reason."""


@dataclass(frozen=True)
class Precision:
    """How the trained side computes: in which dtype, and whether the export rounded its weights to fewer bits."""

    arithmetic: torch.dtype
    rounds_weights: bool


@dataclass(frozen=True)
class Agreement:
    """|trained - export| over `num_values` log-probs (or scores): mean, 99% quantile and maximum, with the bounds of
    the first two. `place` is the (prompt, token) of the maximum, `values` are both sides there. `share`: how much of
    what the adapters changed the export has, 1 where the merge is right; None where rounding hides it."""

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
        """Whether both bounds hold, and the merge adds not more than was trained. NaN never passes. Too small a share
        alone may be rounding: a merge loses what is below half a unit in the last place of its weight."""
        within = self.mean <= self.mean_allowed and self.tail <= self.tail_allowed
        return within and (self.share is None or self.share <= _MOST_SHARE)


def measure_export_error(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Tensor],
    precision: Precision,
    *,
    base: Sequence[Tensor] | None = None,
    trust_remote_code: bool = False,
    as_classifier: bool = False,
    device: torch.device | str = "cpu",
    available_bytes: float | None = None,
    seconds: float | None = None,
) -> Agreement:
    """Compare `ours`, the trained side's log-probs of each prompt's tokens after the first, with those of `folder`.

    `base`: the trained side's without its adapters. `as_classifier`: one score per prompt instead. Host memory holds
    the export as stored and one layer in float32. Runs on one rank. Raises RunError when the folder does not load as
    the whole model, and `Unfinished` when `available_bytes` of host memory or `seconds` do not suffice.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    _check_memory(folder, available_bytes)
    model = _loaded(folder, trust_remote_code, as_classifier)
    where = torch.device(device)
    if where.type == "cuda" and not _fits(where, largest_forward(model), prompts, model):
        where = torch.device("cpu")
    exact = _values(model, prompts, as_classifier, where, Cast(torch.float32), deadline)
    yardstick = _yardstick(model, prompts, as_classifier, where, precision, deadline)
    found = _agreement(_flat(ours), exact, yardstick)
    return found if base is None else replace(found, share=_share(_flat(ours), _flat(base), exact, yardstick))


def _yardstick(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    as_classifier: bool,
    device: torch.device,
    precision: Precision,
    deadline: float | None,
) -> list[Tensor]:
    """The export once more, with the rounding that lies between it and the trained side: each weight moves at random
    within its unit in the last place, and products run in the dtype of the trained side."""
    stored = model.dtype if precision.rounds_weights else torch.float32
    keeps_float32 = transformers_compat.fp32_names(model, precision.arithmetic)
    cast = Cast(precision.arithmetic, partial(moved_within_ulp, stored=stored), keeps_float32)
    try:
        return _values(model, prompts, as_classifier, device, cast, deadline)
    except RuntimeError:  # the library's own model mixes dtypes in 16 bits: only its weights lose bits then
        cast = Cast(torch.float32, partial(moved_within_ulp, stored=precision.arithmetic))
        return _values(model, prompts, as_classifier, device, cast, deadline)


def _flat(values: Sequence[Tensor]) -> list[Tensor]:
    return [value.detach().float().cpu().reshape(-1) for value in values]


def _share(
    ours: Sequence[Tensor], base: Sequence[Tensor], exact: Sequence[Tensor], rounded: Sequence[Tensor]
) -> float | None:
    """The slope of (export - base) over (ours - base), where its standard error by the yardstick is small enough to
    tell 1 from 1.5. The slope of a merge of twice the update is 2, far below the noise of a single token."""
    trained, held, noise = (
        torch.cat([a - b for a, b in zip(*sides, strict=True)]).double()
        for sides in ((ours, base), (exact, base), (rounded, exact))
    )
    square = trained.square().sum()
    error = (trained * noise).square().sum().sqrt() / square
    if not _CERTAIN * error < _MOST_SHARE - 1:  # NaN too
        return None
    return ((trained * held).sum() / square).item()


def _agreement(ours: Sequence[Tensor], exact: Sequence[Tensor], rounded: Sequence[Tensor]) -> Agreement:
    num_values = sum(len(value) for value in exact)
    if not num_values:
        raise Unfinished("no prompt has two tokens")
    gaps = [_gap(a, b) for a, b in zip(ours, exact, strict=True)]
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
        values=(ours[prompt][token].item(), exact[prompt][token].item()),
    )


def _gap(a: Tensor, b: Tensor) -> Tensor:
    """|a - b|. NaN is a mismatch, never an agreement."""
    return (a - b).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))


def _loaded(folder: Path, trust: bool, as_classifier: bool) -> PreTrainedModel:
    """The library's model in the dtype that is stored. Raises RunError."""
    if as_classifier:
        return sequence_classifier.load_classifier(folder, "auto")
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        with transformers_compat.quiet():
            of_text = trust or type(AutoConfig.from_pretrained(folder)) in MODEL_FOR_CAUSAL_LM_MAPPING
            auto: Any = AutoModelForCausalLM if of_text else AutoModelForImageTextToText
            model, info = auto.from_pretrained(folder, dtype="auto", trust_remote_code=trust, output_loading_info=True)
    except Exception as error:  # whatever it is, the export is not what we promise
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


@torch.no_grad()
def _values(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    as_classifier: bool,
    device: torch.device,
    cast: Cast,
    deadline: float | None,
) -> list[Tensor]:
    """Log-probs of each prompt's tokens after the first, or its score: float32 on the CPU."""

    def tick() -> None:
        if deadline is not None and time.monotonic() > deadline:
            raise Unfinished("the comparison took longer than checkpoint.export_check_minutes")

    with cast_layers(model, cast, device, tick):
        if as_classifier:  # the library reads a score at a row's last token: padding would move it
            rows = [torch.tensor([list(prompt)], device=device) for prompt in prompts]
            return [model(input_ids=row, use_cache=False).logits[0, :1].float().cpu() for row in rows]
        found = [torch.empty(0)] * len(prompts)
        for batch in _of_equal_length(prompts):
            ids_BT = torch.tensor([list(prompts[row]) for row in batch], device=device)
            logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
            logprobs_BT = logits_BTV.float().log_softmax(-1).gather(-1, ids_BT[:, 1:, None])[..., 0]
            for row, logprobs_T in zip(batch, logprobs_BT.cpu(), strict=True):
                found[row] = logprobs_T
        return found


def _of_equal_length(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of prompts that one forward takes without padding, which some families do not ignore. Packed rows are
    long, so that all prompts are one batch and each layer is cast once."""
    groups: dict[int, list[int]] = {}
    for row, prompt in enumerate(prompts):
        if len(prompt) > 1:
            groups.setdefault(len(prompt), []).append(row)
    return list(groups.values())


def _check_memory(folder: Path, available_bytes: float | None) -> None:
    stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    needed = host_bytes(stored)
    if available_bytes is not None and needed > available_bytes:
        raise Unfinished(
            f"the reloaded export needs {needed / 2**30:.1f} GiB of host memory, {available_bytes / 2**30:.1f} GiB are "
            "free"
        )


def host_bytes(stored: float) -> float:
    """What `measure` takes of the host for an export of so many bytes: itself, a layer and the tables in float32."""
    return 1.5 * stored


def _fits(device: torch.device, float32_bytes: float, prompts: Sequence[Sequence[int]], model: PreTrainedModel) -> bool:
    """Whether the device has room for the largest layer and all outside of layers, with their logits."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    tokens = len(prompts) * max(map(len, prompts))
    logits = 4 * tokens * model.config.get_text_config().vocab_size * _LOGITS_FACTOR
    return 2 * float32_bytes + logits + 2**30 < free
