"""Text of others (a row, a completion, a server's answer) as it may be printed: a terminal obeys what it contains."""

from __future__ import annotations

import re

# C0 and C1 controls but tab and newline, DEL, and what reorders the text around it
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""The text with its control characters written out: ESC becomes `\x1b`."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
