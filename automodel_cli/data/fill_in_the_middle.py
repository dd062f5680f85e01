"""The section `data.fill_in_the_middle`. Imports no torch and no numpy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.config.value_checks import check_range

Mode = Literal["psm", "spm", "joint"]
UNCHANGED, MOVED, TOO_LONG = 0, 1, 2
"""What became of a document (`Encoded.infill`)."""


@dataclass(frozen=True)
class FillInTheMiddle:
    """Fill-in-the-middle of plain text: a share of the documents is split into prefix, middle and suffix."""

    rate: float = 0.5
    """Share of the documents whose middle is moved to the end."""
    mode: Mode = "psm"
    """Order of the parts: `psm` (prefix, suffix, middle), `spm` (suffix, prefix, middle), or `joint` (each for half of
    the documents)."""
    prefix_token: str | None = None
    """Token before the prefix. null for all tokens: those of Qwen2.5-Coder, CodeGemma, StarCoder2, Granite,
    Code Llama or DeepSeek-Coder that the tokenizer has."""
    suffix_token: str | None = None
    """Token before the suffix."""
    middle_token: str | None = None
    """Token before the middle."""
    end_token: str | None = None
    """Token after the middle, before EOS. null: none, or `▁<EOT>` if the tokens are those of Code Llama."""
    seed: int = 0
    """Seed of the choice of documents and of their splits, which also depend on the text."""

    def __post_init__(self) -> None:
        check_range("fill_in_the_middle.rate", self.rate, at_least=0, at_most=1, fix="data.fill_in_the_middle.rate=0.5")
        given = [name is not None for name in (self.prefix_token, self.suffix_token, self.middle_token)]
        if any(given) != all(given) or (self.end_token is not None and not any(given)):
            raise ConfigError(
                "prefix_token, suffix_token and middle_token must be set together",
                code="requires_setting",
                keys=("fill_in_the_middle",),
                fix="data.fill_in_the_middle='{prefix_token: <PRE>, suffix_token: <SUF>, middle_token: <MID>}'",
            )


def refuse_infill(name: str, what: str) -> DataError:
    """Return the error for a dataset without plain text."""
    return DataError(
        f"fill_in_the_middle applies to plain text, but {name} has {what}",
        code="wrong_data_kind",
        keys=("data.fill_in_the_middle",),
        fix="data.fill_in_the_middle=null, or fill_in_the_middle: false in its entry of data.datasets",
    )
