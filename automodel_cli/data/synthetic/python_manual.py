"""Text that comes with Python: the topics of `help()`, from the language reference. Torch-free."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from automodel_cli.config.value_checks import check_range
from automodel_cli.data.json_reader import Row


@dataclass(frozen=True)
class PythonManual:
    """About 80 documents of English text with code, 460 KB in total, for pretraining without a download.

    The text is that of the installed Python, so it differs slightly between Python releases.
    """

    held_out_every: int = 8
    """Hold out every n-th document, in alphabetical order of the topics, for validation."""

    format: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        check_range("held_out_every", self.held_out_every, at_least=2, fix="data.generator.held_out_every=8")

    def rows(self, split: Literal["train", "validation"]) -> Iterator[Row]:
        """The documents of one split: dicts with `text`."""
        from pydoc_data.topics import topics

        for number, name in enumerate(sorted(topics)):
            if (number % self.held_out_every == 0) == (split == "validation"):
                yield {"text": topics[name]}

    def cache_key(self) -> str:
        """Hex digest of the text and the split."""
        from pydoc_data.topics import topics

        text = json.dumps([type(self).__name__, self.held_out_every, sorted(topics.items())])
        return hashlib.sha256(text.encode()).hexdigest()
