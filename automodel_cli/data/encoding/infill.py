"""Fill-in-the-middle: documents of which the middle is moved to the end (Bavarian et al., arXiv:2207.14255).

A document is split at two characters, drawn uniformly, into prefix, middle and suffix. Each is tokenized on its own:

    psm   <prefix> prefix <suffix> suffix <middle> middle
    spm   <prefix> <suffix> suffix <middle> prefix middle     (variant 2 of the paper, appendix D)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.fill_in_the_middle import FillInTheMiddle, Mode
from automodel_cli.data.tokenized import encode_texts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONVENTIONS: tuple[tuple[str, str, str, str | None], ...] = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", None),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", None),
    ("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>", None),
)
"""Tokens of Qwen2.5-Coder and CodeGemma; StarCoder2 and Granite; Code Llama; and DeepSeek-Coder. The fourth ends the
middle. In DeepSeek-Coder, `hole` comes before the suffix and `end` before the middle. Codestral, Seed-Coder and
CodeGeeX4 are not listed: they expect the suffix before the prefix, each with its own token."""


@dataclass(frozen=True)
class InfillSpec:
    """Settings of fill-in-the-middle for one tokenizer.

    Attributes:
        ids: tokens before prefix, suffix and middle, and after the middle. None: no such token.
        anchor: text of the first of them.
        max_tokens: longest document that is changed, with all its tokens. None: no limit.
    """

    rate: float
    mode: Mode
    seed: int
    ids: tuple[int | None, ...]
    anchor: str
    max_tokens: int | None

    def split(self, text: str) -> tuple[str, str, str, bool] | None:
        """Return prefix, middle, suffix and whether the order is spm, or None for a document that stays as it is.

        The result depends on the text and the seed only.
        """
        # By text and not by index: the choice does not change if rows are added, and equal texts are split alike.
        key = xxhash.xxh3_128_intdigest(text.encode("utf-8", "surrogatepass"), self.seed & (2**64 - 1))
        chosen = np.random.Generator(np.random.Philox(key=[key >> 64, key & (2**64 - 1)]))
        draw, order = chosen.random(2)
        if draw >= self.rate:
            return None
        first, second = sorted(chosen.integers(0, len(text) + 1, 2).tolist())
        is_spm = self.mode == "spm" or (self.mode == "joint" and order < 0.5)
        return text[:first], text[first:second], text[second:], is_spm

    def arranged(self, parts: Sequence[np.ndarray], *, is_spm: bool) -> np.ndarray:
        """Return the tokens of a document in their new order, int32. `parts`: prefix, middle and suffix."""
        prefix, middle, suffix = parts
        before, after, between, end = (np.array([] if token is None else [token], np.int32) for token in self.ids)
        # Example: prefix 1 2, middle 3, suffix 4 5. psm: <PRE> 1 2 <SUF> 4 5 <MID> 3. spm: <PRE> <SUF> 4 5 <MID> 1 2 3.
        ordered = [before, prefix, after, suffix, between, middle, end]
        if is_spm:
            ordered = [before, after, suffix, between, prefix, middle, end]
        return np.concatenate(ordered).astype(np.int32)


def resolve_infill(node: FillInTheMiddle, tokenizer: PreTrainedTokenizerBase, max_tokens: int | None) -> InfillSpec:
    """Return the settings with token ids. Raises ConfigError if the tokenizer lacks the tokens.

    Args:
        max_tokens: longest document that is changed, with all its tokens. None: no limit.
    """
    vocabulary = tokenizer.get_vocab()
    names = node.prefix_token, node.suffix_token, node.middle_token, node.end_token
    if node.prefix_token is None:
        names = next((each for each in CONVENTIONS if set(each[:3]) <= vocabulary.keys()), CONVENTIONS[0])
    missing = [name for name in names if name is not None and name not in vocabulary]
    if node.prefix_token is None and missing == ["▁<EOT>"]:
        names, missing = (*names[:3], None), []
    if missing:
        listed = ", ".join(str(name) for name in missing)
        quoted = ", ".join(f'"{name}"' for name in missing)
        found = "no known tokens for prefix, suffix and middle" if node.prefix_token is None else f"no {listed}"
        raise ConfigError(
            f"fill_in_the_middle requires tokens that mark the parts, but the tokenizer has {found}",
            code="unknown_name",
            keys=("data.fill_in_the_middle",),
            fix=f"model.tokenizer.add_special_tokens='[{quoted}]', or the names of its tokens in "
            "data.fill_in_the_middle",
        )
    ids = [None if name is None else int(vocabulary[name]) for name in names]
    return InfillSpec(node.rate, node.mode, node.seed, tuple(ids), str(names[0]), max_tokens)


def anchored(tokenizer: PreTrainedTokenizerBase, spec: InfillSpec) -> bool:
    """Return whether parts must be tokenized after a token, so that no space is added in front of them.

    Raises ConfigError if a space is added there too, because the parts could not be joined again.
    """
    alone, after = encode_texts(tokenizer, ["x"])[0], after_anchor(tokenizer, spec, ["x"])[0]
    if alone.tolist() == after.tolist() and _begins_with_x(tokenizer, alone):
        return False
    if not _begins_with_x(tokenizer, after):
        raise ConfigError(
            f"fill_in_the_middle is not supported with {type(tokenizer).__name__}, which adds a space in front of "
            "every part of a text",
            code="not_supported_by_model",
            keys=("data.fill_in_the_middle",),
            fix="data.fill_in_the_middle=null",
        )
    return True


def _begins_with_x(tokenizer: PreTrainedTokenizerBase, ids: np.ndarray) -> bool:
    return bool(len(ids)) and str(tokenizer.convert_ids_to_tokens(int(ids[0]))).startswith("x")


def after_anchor(tokenizer: PreTrainedTokenizerBase, spec: InfillSpec, parts: Sequence[str]) -> list[np.ndarray]:
    """Return the tokens of parts of a text as they are after a token."""
    return [ids[1:] for ids in encode_texts(tokenizer, [spec.anchor + part for part in parts])]


def infill_policy_error(tokenizer: PreTrainedTokenizerBase, policy: str) -> ConfigError:
    """Return the error for a tokenizer whose parts follow a token, and special tokens in text that stay text."""
    return ConfigError(
        f"special_tokens_policy={policy} is not supported with fill_in_the_middle and {type(tokenizer).__name__}, "
        "whose parts must be tokenized after a control token",
        code="unsupported_combination",
        keys=("data.special_tokens_policy", "data.fill_in_the_middle"),
        fix="data.special_tokens_policy=keep",
    )
