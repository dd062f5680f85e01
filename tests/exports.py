"""The difference between an export and the trained model, as `run/export.py` measures it."""

from datetime import timedelta
from functools import partial
from pathlib import Path

from automodel_cli.distributed import process_group
from automodel_cli.models.checkpoint_io.export import rounds_weights, trained_values
from automodel_cli.models.checkpoint_io.export_check import Precision, measure_export_error


def verify_export(directory, parts, prompts) -> float:
    """Reload the folder with transformers and return the largest difference of log-probs on token ids. Collective."""
    token_ids = [list(prompt) for prompt in prompts]
    trained_side = trained_values(parts, token_ids)
    precision = Precision(parts[0].model.dtype, rounds_weights=rounds_weights(parts))
    work = partial(measure_export_error, Path(directory), token_ids, trained_side, precision)
    return process_group.from_first_rank(work, timedelta(minutes=60)).worst
