"""Attention in which the tokens of a picture see each other in both directions (Gemma 3).

A query sees an interval of keys: from the start of its document or window to itself, or to the last token of its
picture. A picture is a run of image tokens of one document.

With context parallelism, queries are the local tokens of a rank and keys are those of all ranks, in the order of the
rows.

Shapes: B rows, T tokens, N = B*T tokens, t and n local tokens. One rank has all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_cli.models.attention.flex_visibility import Visible, document_positions, visible_intervals
from automodel_cli.models.context_parallel_layout import Context

Rule = Literal["causal", "in_window", "whole"]
"""How the layers of a kind see pictures: not at all in advance, within their window, or all tokens of the picture."""


@dataclass(frozen=True)
class TwoWay:
    """Rules of the layers of a text model, measured on the masks of the composite."""

    full: Rule = "causal"
    sliding: Rule = "causal"


@dataclass(frozen=True)
class PictureRuns:
    """Runs of image tokens of a microbatch.

    Attributes:
        first_N, last_N: first and last token of the run of each token, int32 positions in the flat rows. Other tokens
            are runs of their own.
        rules: rules of the layers.
        shape: (B, T).
        context: local tokens of this rank, with context parallelism. The rows have its padding then.
        visible: visible keys by window, computed once for all layers.
    """

    first_N: Tensor
    last_N: Tensor
    rules: TwoWay
    shape: tuple[int, int]
    context: Context | None = None
    visible: dict[int | None, Visible] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, is_shown_BT: Tensor, rules: TwoWay, context: Context | None = None) -> PictureRuns:
        """Build from the mask of image tokens of full rows. No host synchronization."""
        if context is not None:
            is_shown_BT = F.pad(is_shown_BT, (0, context.tokens - is_shown_BT.shape[1]))
        rows, tokens = is_shown_BT.shape
        token_BT = torch.arange(tokens, device=is_shown_BT.device).expand(rows, -1)
        # Example: text, picture, picture, text, picture. The runs are tokens 0, 1-2, 3 and 4: first 0 1 1 3 4, last 0 2
        # 2 3 4. A token of a picture sees up to the last token of its run, a text token up to itself.
        row_B1 = torch.arange(rows, device=is_shown_BT.device)[:, None] * tokens
        before_BT = torch.where(is_shown_BT, -1, token_BT).cummax(1).values  # the last token that shows no picture
        after_BT = torch.where(is_shown_BT, tokens, token_BT).flip(1).cummin(1).values.flip(1)
        first_BT = torch.where(is_shown_BT, before_BT + 1, token_BT) + row_B1
        last_BT = torch.where(is_shown_BT, after_BT - 1, token_BT) + row_B1
        return cls(first_BT.flatten().int(), last_BT.flatten().int(), rules, (rows, tokens), context)

    def rule(self, window: int | None) -> Rule:
        """Return the rule of a layer with this window."""
        return self.rules.full if window is None else self.rules.sliding

    def visible_to(self, cu_seqlens: Tensor | None, window: int | None) -> Visible:
        """Return the visible keys of a layer with this window. `context` has its own document boundaries."""
        if window not in self.visible:
            (rows, length), device = self.shape, self.first_N.device
            if self.context is not None:
                cu_seqlens = torch.tensor(self.context.bounds, device=device)
            cu = torch.arange(0, rows * length + 1, length, device=device) if cu_seqlens is None else cu_seqlens
            lower_N, upper_N, position_N = self._interval(cu, rows * length, window)
            lower_n, upper_n = lower_N, upper_N
            if self.context is not None:
                lower_n, upper_n = (bound[self.context.global_index()] for bound in (lower_N, upper_N))
            self.visible[window] = visible_intervals(upper_n, lower_n, position_N)
        return self.visible[window]

    def mask(self, cu_seqlens: Tensor | None, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask `[B, 1, t, T]`, for kernels that take one."""
        (rows, length), visible = self.shape, self.visible_to(cu_seqlens, window)
        first_B1 = torch.arange(rows, device=self.first_N.device)[:, None] * length
        bounds = visible.lower_N, visible.position_N
        lower_Bt1, upper_Bt1 = ((bound.view(rows, -1) - first_B1)[..., None] for bound in bounds)
        key_T = torch.arange(length, device=self.first_N.device)
        # [T] against [B, t, 1]: (B, t, T).
        sees_BtT = (key_T >= lower_Bt1) & (key_T <= upper_Bt1)
        mask_BtT = torch.zeros(sees_BtT.shape, dtype=dtype, device=key_T.device)
        return mask_BtT.masked_fill_(~sees_BtT, float("-inf"))[:, None]

    def whole_rows(self, x_BKtD: Tensor) -> Tensor:
        """Return the keys or values of full rows `[B, K, T, D]`. Collective with context parallelism."""
        if self.context is None:
            return x_BKtD
        gathered_NKD = self.context.group.gather(x_BKtD.transpose(1, 2).flatten(0, 1))
        whole_BTKD: Tensor = gathered_NKD[self.context.gathered_index()].unflatten(0, self.shape)
        return whole_BTKD.transpose(1, 2)

    def _interval(self, cu: Tensor, num_tokens: int, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
        """Return the lowest and highest visible position of each token, and its own."""
        position_N, start_N, _ = document_positions(cu, num_tokens, None)
        document_N = torch.searchsorted(cu[1:].contiguous(), position_N.to(cu.dtype), right=True)
        end_N = cu[document_N + 1].to(torch.int32) - 1
        lower_N = start_N
        if window is not None:
            lower_N = position_N - (window - 1)
            if self.rules.sliding == "whole":
                lower_N = torch.minimum(lower_N, self.first_N)
            lower_N = torch.maximum(lower_N, start_N)
        # A picture never sees beyond its document, also if another document begins with a picture.
        return lower_N, torch.minimum(self.last_N, end_N), position_N
