"""Attention in which the tokens of a picture see each other in both directions (Gemma 3).

A query sees an interval of keys: from the start of its document or window to itself, or to the last token of its
picture. A picture is a run of image tokens of one document.

Shapes: B rows, T tokens, N = B*T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from automodel_cli.models.attention.flex_visibility import Visible, document_positions, visible_intervals

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
        visible: visible keys by window, computed once for all layers.
    """

    first_N: Tensor
    last_N: Tensor
    rules: TwoWay
    visible: dict[int | None, Visible] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, is_shown_BT: Tensor, rules: TwoWay) -> PictureRuns:
        """Build from the mask of image tokens. No host synchronization."""
        rows, tokens = is_shown_BT.shape
        token_BT = torch.arange(tokens, device=is_shown_BT.device).expand(rows, -1)
        # Example: text, picture, picture, text, picture. The runs are tokens 0, 1-2, 3 and 4: first 0 1 1 3 4, last 0 2
        # 2 3 4. A token of a picture sees up to the last token of its run, a text token up to itself.
        row_B1 = torch.arange(rows, device=is_shown_BT.device)[:, None] * tokens
        before_BT = torch.where(is_shown_BT, -1, token_BT).cummax(1).values  # the last token that shows no picture
        after_BT = torch.where(is_shown_BT, tokens, token_BT).flip(1).cummin(1).values.flip(1)
        first_BT = torch.where(is_shown_BT, before_BT + 1, token_BT) + row_B1
        last_BT = torch.where(is_shown_BT, after_BT - 1, token_BT) + row_B1
        return cls(first_BT.flatten().int(), last_BT.flatten().int(), rules)

    def rule(self, window: int | None) -> Rule:
        """Return the rule of a layer with this window."""
        return self.rules.full if window is None else self.rules.sliding

    def visible_to(self, cu_seqlens: Tensor | None, rows: int, length: int, window: int | None) -> Visible:
        """Return the visible keys of a layer with this window."""
        if window not in self.visible:
            device = self.first_N.device
            cu = torch.arange(0, rows * length + 1, length, device=device) if cu_seqlens is None else cu_seqlens
            lower_N, upper_N, position_N = self._interval(cu, rows * length, window)
            self.visible[window] = visible_intervals(upper_N, lower_N, position_N)
        return self.visible[window]

    def mask(self, cu_seqlens: Tensor | None, rows: int, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Return the additive mask `[B, 1, T, T]` of full rows, for kernels that take one."""
        visible = self.visible_to(cu_seqlens, rows, length, window)
        first_B1 = torch.arange(rows, device=self.first_N.device)[:, None] * length
        bounds = visible.lower_N, visible.position_N
        lower_BT1, upper_BT1 = ((bound.view(rows, length) - first_B1)[..., None] for bound in bounds)
        key_T = torch.arange(length, device=self.first_N.device)
        # [T] against [B, T, 1]: (B, T, T).
        sees_BTT = (key_T >= lower_BT1) & (key_T <= upper_BT1)
        mask_BTT = torch.zeros(sees_BTT.shape, dtype=dtype, device=key_T.device)
        return mask_BTT.masked_fill_(~sees_BTT, float("-inf"))[:, None]

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
