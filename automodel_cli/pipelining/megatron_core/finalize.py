"""What gradients need between the last backward and the optimizer, with Megatron-core's `finalize_model_grads`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.pipelining.megatron_core.config import ProcessGroupCollection


@torch.no_grad()
def finalize_model_grads(
    model: Sequence[nn.Module],
    num_tokens: Tensor | None = None,
    *,
    pg_collection: ProcessGroupCollection,
    shared_embedding: nn.Parameter | None = None,
) -> None:
    """Complete the gradients of one step, in this order: copies of a tied table are summed, then tokens divide.

    Data-parallel reduction is over by now; the wrapper of each model chunk has done it. `shared_embedding` is this
    rank's copy of a table that several stages hold, summed over `pg_collection.embd`; None on ranks without one.
    `num_tokens` (with calculate_per_token_loss) is known on the last stage: it is sent to the other stages and summed
    over `dp_cp`, and every gradient is divided by it (by 1 when it is 0), once. Collective over all three groups.
    """
    if shared_embedding is not None and pg_collection.embd is not None:
        if shared_embedding.grad is None:
            shared_embedding.grad = torch.zeros_like(shared_embedding)
        dist.all_reduce(shared_embedding.grad, group=pg_collection.embd)
    if num_tokens is None:
        return
    num_tokens = num_tokens.clone()
    if pg_collection.pp is not None:
        last = dist.get_global_rank(pg_collection.pp, pg_collection.pp.size() - 1)
        dist.broadcast(num_tokens, src=last, group=pg_collection.pp)
    if pg_collection.dp_cp is not None:
        dist.all_reduce(num_tokens, group=pg_collection.dp_cp)
    for grad in _gradients(model):
        grad.div_(num_tokens.clamp(min=1))


def _gradients(models: Sequence[Any]) -> Iterator[Tensor]:
    seen: set[int] = set()
    for param in (param for model in models for param in model.parameters()):
        if param.grad is not None and id(param) not in seen:
            seen.add(id(param))
            yield param.grad
