"""What runs in place of plain torch operators in this process, one line per subject, for the startup summary."""

from __future__ import annotations

_lines: dict[str, str] = {}


def record(subject: str, text: str) -> None:
    """Set the line of a subject: the kernel that runs, or `torch operators` with the reason."""
    _lines[subject] = text


def lines() -> dict[str, str]:
    """Return subject -> text, in the order in which subjects were first recorded."""
    return dict(_lines)


def clear() -> None:
    """Forget the lines of an earlier model."""
    _lines.clear()
