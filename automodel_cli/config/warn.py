"""Log warnings with a stable code."""

from __future__ import annotations

import logging

_logger = logging.getLogger("automodel_cli")


def warn(code: str, message: str, *values: object) -> None:
    """Log `[code] message` as a warning.

    Args:
        code: a code of `config.error_codes`. Also the attribute `code` of the log record.
        message: a format string of `logging`, filled with `values` if the record is emitted.
    """
    _logger.warning(f"[{code}] {message}", *values, extra={"code": code}, stacklevel=2)
