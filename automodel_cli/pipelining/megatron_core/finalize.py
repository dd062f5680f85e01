"""Final gradient reductions between the last backward and the optimizer: Megatron-core's `finalize_model_grads`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    """Complete the gradients of one step: sum copies of a tied table, then divide by the number of tokens.

    The wrapper of each model chunk has already reduced the gradients over data-parallel ranks. Collective over all
    three groups.

    Args:
        num_tokens: number of tokens on the last stage, with `calculate_per_token_loss`. It is broadcast to the other
            stages and summed over `dp_cp`. Every gradient is divided by it once (by 1 if it is 0).
        shared_embedding: the local copy of a table that several stages have, whose gradient is summed over
            `pg_collection.embd`. None on ranks without a copy.
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


def _gradients(models: Sequence[nn.Module]) -> Iterator[Tensor]:
    seen: set[int] = set()
    for param in (param for model in models for param in model.parameters()):
        if param.grad is not None and id(param) not in seen:
            seen.add(id(param))
            yield param.grad
