"""The difference between an export and the trained model, as `run/export.py` measures it, and log-probs of tokens."""

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from automodel_cli.data.batch import one_document
from automodel_cli.distributed import process_group
from automodel_cli.models.checkpoint_io.export import rounds_weights, trained_values
from automodel_cli.models.checkpoint_io.export_check import Precision, measure_export_error
from automodel_cli.models.model_part import ModelPart


def verify_export(directory, parts, prompts) -> float:
    """Reload the folder with transformers and return the largest difference of log-probs on token ids. Collective."""
    token_ids = [list(prompt) for prompt in prompts]
    trained_side = trained_values(parts, token_ids)
    precision = Precision(parts[0].model.dtype, rounds_weights=rounds_weights(parts))
    work = partial(measure_export_error, Path(directory), token_ids, trained_side, precision)
    return process_group.from_first_rank(work, timedelta(minutes=60)).worst


@torch.no_grad()
def nudged(part: ModelPart) -> ModelPart:
    """Add noise to every trained parameter."""
    generator = torch.Generator().manual_seed(0)
    for param in part.parameters():
        if param.requires_grad:
            param.add_(torch.randn(param.shape, generator=generator, dtype=param.dtype), alpha=0.05)
    return part


@torch.no_grad()
def logprobs_of(model: Any, ids: list[int]) -> Tensor:
    """Return the log-probs of the tokens after the first, by a part or a model of transformers or peft."""
    if isinstance(model, ModelPart):
        batch = one_document(ids)
        return model(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT[0, :-1]
    row = torch.tensor([ids])
    return model(row).logits.log_softmax(-1)[0, :-1].gather(-1, row[0, 1:, None])[:, 0]
