"""Explain dtype errors of model code that mixes float32 with the compute dtype."""

from __future__ import annotations

import re
import traceback

import torch

from automodel_cli.config.errors import RunError

_MIXED = re.compile(r"same dtype|dtypes match|expected scalar type|should have the same type", re.IGNORECASE)
_FLOAT32 = "parallelizer.mp_policy.param_dtype=float32"


def mixes_dtypes(error: BaseException) -> bool:
    """Return whether torch rejected operands of different dtypes in the library's model code."""
    if not isinstance(error, RuntimeError) or not _MIXED.search(str(error)):
        return False
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return any("transformers/models/" in name or "transformers_modules/" in name for name in files)


def explain_mixed_dtypes(error: BaseException, compute_dtype: torch.dtype) -> RunError | None:
    """Return the error for model code that keeps some tensors in float32. None for other errors."""
    if compute_dtype == torch.float32 or not mixes_dtypes(error):
        return None
    last = traceback.extract_tb(error.__traceback__)[-1]
    dtype = str(compute_dtype).removeprefix("torch.")
    return RunError(
        f"mp_policy.param_dtype={dtype} is not supported by this model, whose code mixes it with float32: {error} "
        f"({last.filename}:{last.lineno})",
        code="not_supported_by_model",
        keys=("parallelizer.mp_policy.param_dtype",),
        fix=_FLOAT32,
    )
