"""Which parts of a family run in fused kernels, measured on a tiny copy of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from automodel_cli.distributed.fusion_coverage import KINDS, coverage_of
from automodel_cli.models import transformers_compat
from automodel_cli.models.lm_head.detection import detect_head
from automodel_cli.models.probes.token_mixing import SmallConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_RECORDED = "recorded_calls"


def fused_parts(hf_config: PretrainedConfig) -> list[str]:
    """Return the kinds of `coverage.KINDS` that kernels cover, with `attention` and `head`.

    attention: the family calls the attention interface of transformers, so that packed attention replaces it.
    head: the log-probs come from the chunked head and not from the family's own logits.

    Raises the errors of the family if no tiny copy can be built or run.
    """
    small = SmallConfig(hf_config)
    coverage = coverage_of(small.build("eager"))
    found = [kind for kind in KINDS if coverage.get(kind)]
    if _calls_attention(small):
        found.append("attention")
    if detect_head(small.config).name != "generic":
        found.append("head")
    return found


@torch.no_grad()
def _calls_attention(small: SmallConfig) -> bool:
    """Return whether a forward calls attention functions that are registered with transformers."""
    from transformers import AttentionInterface

    calls: list[nn.Module] = []

    def record(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, None]:
        calls.append(module)
        rows, heads, tokens, _width = query.shape
        return query.new_zeros(rows, tokens, heads, value.shape[-1]), None

    model = small.build("eager").eval()
    AttentionInterface.register(_RECORDED, record)
    with transformers_compat.quiet():
        model.set_attn_implementation(_RECORDED)
        model.base_model(input_ids=torch.ones(1, 8, dtype=torch.long), use_cache=False)
    return bool(calls)
