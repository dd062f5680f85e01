"""Measure which layers of a text model see the tokens of a picture in both directions.

The masks that the composite makes for its text model are compared with the known rules on a small copy. A composite
that needs pixels for that, and one without masks, counts as causal: the picture probe compares numbers afterwards.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from automodel_cli.models import transformers_compat
from automodel_cli.models.attention.picture_runs import PictureRuns, Rule, TwoWay
from automodel_cli.models.hub import composite_text
from automodel_cli.models.vision.front import Front
from automodel_cli.models.vision.small import placeholder_of, shared_copy

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_IS_SHOWN = (False, False, *[True] * 14, False, *[True] * 9, *[False] * 3)
"""Pictures longer than the window of a small copy."""
_measured: dict[tuple[type, str], TwoWay | None] = {}
_of_copies: WeakKeyDictionary[PreTrainedModel, TwoWay | None] = WeakKeyDictionary()


def two_way_of(composite_config: PretrainedConfig) -> TwoWay | None:
    """Return the rules of the layers, None if all are causal. Cached."""
    key = (type(composite_config), composite_config.to_json_string())
    if key not in _measured:
        try:
            with transformers_compat.quiet():
                _measured[key] = rules_of(shared_copy(composite_config))
        except Exception:  # the picture probe reports a small copy that does not run
            _measured[key] = None
    return _measured[key]


def rules_of(whole: PreTrainedModel) -> TwoWay | None:
    """Return the rules of a small composite in memory, None if all layers are causal or the masks are unknown."""
    if whole not in _of_copies:
        _of_copies[whole] = _rules(whole)
    return _of_copies[whole]


def _rules(whole: PreTrainedModel) -> TwoWay | None:
    config = whole.config
    eager = copy.deepcopy(whole)
    eager.set_attn_implementation("eager")
    front = Front(eager, eager.get_submodule(str(composite_text.text_module(eager))))
    placeholder = placeholder_of(config)
    is_shown_BT = torch.tensor(_IS_SHOWN)[None]
    ids_BT = torch.where(is_shown_BT, placeholder, 5)
    try:
        masks = front.masks_of_types(ids_BT, placeholder)
    except Exception:  # composites that check pixels against image tokens, or read grids of pictures
        return None
    kinds = masks if isinstance(masks, dict) else {"full_attention": masks}
    window = getattr(config.get_text_config(), "sliding_window", None)
    rules: dict[str, Rule] = {}
    for kind, mask in kinds.items():
        if isinstance(mask, Tensor) and mask.ndim == 4:
            is_sliding = "sliding" in kind
            found = _rule(mask, is_shown_BT, window if is_sliding else None)
            rules["sliding" if is_sliding else "full"] = found
    return None if set(rules.values()) <= {"causal"} else TwoWay(**rules)


def _rule(mask_1BTT: Tensor, is_shown_BT: Tensor, window: int | None) -> Rule:
    """Return the rule that gives this mask. An unknown mask counts as causal, which the picture probe rejects."""
    sees_TT = mask_1BTT[0, 0] if mask_1BTT.dtype == torch.bool else mask_1BTT[0, 0] == 0
    for rule in get_args(Rule):
        if torch.equal(visible_by(rule, is_shown_BT, window), sees_TT):
            found: Rule = rule
            return found
    return "causal"


def visible_by(rule: Rule, is_shown_BT: Tensor, window: int | None) -> Tensor:
    """Return `[T, T]`: which keys each query of one document sees."""
    runs = PictureRuns.of(is_shown_BT & (rule != "causal"), TwoWay(rule, rule))
    return runs.mask(None, window, torch.float32)[0, 0] == 0
