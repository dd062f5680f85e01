"""Settings that determine the tokens of a row."""

from __future__ import annotations

from dataclasses import dataclass

from automodel_cli.data.config import Mask, SpecialTokensInText, Turns
from automodel_cli.data.encoding.infill import InfillSpec
from automodel_cli.data.formats.base import Format
from automodel_cli.data.groups import GroupSpec
from automodel_cli.data.labels import LabelSpec


@dataclass(frozen=True)
class EncodeSpec:
    """Settings that determine the tokens of a row, in addition to the tokenizer.

    `own_template` is the tokenizer's template if `template` replaces it for training. `stop_ids` are the tokens other
    than EOS at which generation stops.
    """

    fmt: Format
    columns: dict[str, str]
    template: str | None
    mask: Mask
    ignored_columns: tuple[str, ...] = ()
    turns: Turns = "auto"
    own_template: str | None = None
    stop_ids: tuple[int, ...] = ()
    special_tokens_policy: SpecialTokensInText = "auto"
    add_bos: bool = True
    add_eos: bool = True
    row_spec: LabelSpec | GroupSpec | None = None
    infill: InfillSpec | None = None

    @property
    def special_choice(self) -> SpecialTokensInText:
        """How special tokens in the text of rows are encoded, with `auto` resolved."""
        if self.special_tokens_policy != "auto":
            return self.special_tokens_policy
        return "keep" if self.template is None or self.fmt.makes == "texts" else "as_text"
