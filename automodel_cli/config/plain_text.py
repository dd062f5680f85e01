"""Sanitize untrusted text (a row, a completion, a server's response) for printing, because terminals interpret it."""

from __future__ import annotations

import re

# C0 and C1 controls except tab and newline, DEL, and characters that reorder the text around them
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    r"""The text with its control characters written out: ESC becomes `\x1b`."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
