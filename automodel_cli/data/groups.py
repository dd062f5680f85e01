"""How rows of a query and passages are read. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from automodel_cli.data.formats.base import DataKind


@dataclass(frozen=True)
class GroupSpec:
    """Text before queries and before passages, the most tokens of a text, and whether pairs have a score."""

    query_prompt: str = ""
    passage_prompt: str = ""
    max_tokens: int | None = None
    scored: bool = False

    kind: ClassVar[DataKind] = "groups"
