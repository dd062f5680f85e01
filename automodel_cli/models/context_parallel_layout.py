"""How the rows of a microbatch lie on the ranks of context parallelism.

Every rank is given whole rows. A row is padded to a multiple of twice the number of ranks and cut into that many
chunks; a rank keeps an early chunk and its mirror image, so that causal attention costs all ranks the same. Labels are
shifted before this, position ids count within documents, and the padding is a document of its own, so nothing but
attention has to know. Attention finds the microbatch's `Context` in its keyword `context`, which therefore survives
pipelining (several microbatches in flight) and recomputation.

Shapes: B rows of T tokens as given, P tokens padded; t = P / ranks local tokens of a row; N = B*t.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_cli.data.batch import dual_chunks


class ContextGroup(Protocol):
    """The ranks that share rows, and what they exchange. Implemented by `distributed.context_parallel`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def ring(self) -> bool:
        """Whether attention passes keys around instead of gathering them."""
        ...

    def pass_on(self, x: Tensor) -> Callable[[], Tensor]:
        """Start to send `x` to the next rank; the function waits for the previous rank's. No gradients. Collective."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """`[n, ...]` of every rank, one rank after another: `[size * n, ...]`. The backward sums over ranks and
        scatters. Collective."""
        ...

    def gather_results(self, x: Tensor) -> Tensor:
        """The same for results that every rank then uses alike: the backward takes this rank's slice. Collective."""
        ...


class OneProcess:
    """A `ContextGroup` of this process alone: there is nothing to exchange."""

    rank, size, ring = 0, 1, False

    def gather(self, x: Tensor) -> Tensor:
        return x

    def gather_results(self, x: Tensor) -> Tensor:
        return x

    def pass_on(self, x: Tensor) -> Callable[[], Tensor]:
        return lambda: x


class Context:
    """One microbatch on one rank."""

    def __init__(
        self,
        group: ContextGroup,
        shape: tuple[int, int],
        cu_seqlens: Sequence[int] | Tensor | None,
        device: torch.device,
        owners: tuple[tuple[int, ...], ...] | None = None,
    ):
        """`shape` (B, T) and `cu_seqlens` are those of the whole batch, None for one document a row; a tensor on a CUDA
        device is waited for. `owners`: the chunks of each rank, `dual_chunks(group.size)` unless told."""
        self.group = group
        self.owners = owners or dual_chunks(group.size)
        num_chunks = sum(len(chunks) for chunks in self.owners)
        self.rows, self._length = shape
        self.tokens = local_length(self._length, num_chunks // 2) * (num_chunks // 2)
        self.chunk = self.tokens // num_chunks
        self.bounds = self._padded_bounds(cu_seqlens)
        order_P = torch.cat([torch.arange(self.chunk) + j * self.chunk for chunks in self.owners for j in chunks])
        self._host_where_P = order_P.argsort()
        self._where_P = self._host_where_P.to(device)
        self._local_t = order_P.view(group.size, -1)[group.rank].to(device)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Which chunks of each row this rank holds, in the order of its local tokens."""
        return self.owners[self.group.rank]

    def _padded_bounds(self, cu_seqlens: Sequence[int] | Tensor | None) -> tuple[int, ...]:
        """Documents over the B*P padded tokens."""
        length, padding = self._length, self.tokens - self._length
        given = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
        if given is None:
            given = range(0, self.rows * length + 1, length)
        bounds = [0]
        for start, end in itertools.pairwise(given):
            if end > start:
                bounds.append(end + start // length * padding)
                if padding and end % length == 0:
                    bounds.append(bounds[-1] + padding)
        return tuple(bounds)

    def local(self, x_BT: Tensor, fill: int) -> Tensor:
        """This rank's tokens of a whole column `[B, T, ...]`; `fill` in the padding."""
        after = (0, 0) * (x_BT.ndim - 2)
        return F.pad(x_BT, (*after, 0, self.tokens - self._length), value=fill).index_select(1, self._local_t)

    def local_label_positions(self, label_positions_S: Tensor) -> Tensor:
        """Places among the B*T tokens, in host memory, -> those of them that this rank has, among its B*t tokens and in
        their order."""
        row_S, token_S = label_positions_S // self._length, label_positions_S % self._length
        size = self.tokens // self.group.size
        place_S = self._host_where_P[token_S] - self.group.rank * size
        mine_S = (place_S >= 0) & (place_S < size)
        local = (row_S * size + place_S)[mine_S].sort().values
        return local.to(self._local_t.device, non_blocking=True)

    def local_positions(self, position_ids_BT: Tensor) -> Tensor:
        """The same for positions, which start again in the padding, as in any document."""
        padding = torch.arange(self.tokens - self._length, device=position_ids_BT.device)
        whole_BP = torch.cat([position_ids_BT, padding.expand(self.rows, -1)], 1)
        return whole_BP.index_select(1, self._local_t)

    def local_document_lengths(self) -> Tensor:
        """`[B, t]`: of how many tokens the whole document of each local token is; padding counts as a document."""
        lengths = torch.tensor([end - start for start, end in itertools.pairwise(self.bounds)])
        whole_BP = lengths.repeat_interleave(lengths).view(self.rows, self.tokens)
        return whole_BP.to(self._local_t.device).index_select(1, self._local_t)

    def local_inputs(self, input_ids_BT: Tensor, position_ids_BT: Tensor) -> dict[str, Any]:
        """What the model is called with: this rank's tokens, and the context in place of the document boundaries."""
        positions_Bt = self.local_positions(position_ids_BT)
        return {"input_ids": self.local(input_ids_BT, 0), "position_ids": positions_Bt, "context": self}

    def whole(self, x_Bt: Tensor) -> Tensor:
        """Results per local token `[B, t, ...]` -> `[B, T, ...]` in the order of the rows, on all ranks. Collective."""
        of_ranks = self.group.gather_results(x_Bt.contiguous()).unflatten(0, (self.group.size, self.rows))
        return of_ranks.transpose(0, 1).flatten(1, 2).index_select(1, self._where_P[: self._length])

    def whole_index(self) -> Tensor:
        """`[B*t]`: where each local token lies in the flat whole rows of P tokens."""
        row_B1 = torch.arange(self.rows, device=self._local_t.device)[:, None]
        return (row_B1 * self.tokens + self._local_t).flatten()

    def gathered_index(self) -> Tensor:
        """`[B*P]`: where each token of the whole rows lies after `group.gather` of the flat local tokens."""
        local = self.tokens // self.group.size
        rank_P, token_P = self._where_P // local, self._where_P % local
        row_B1 = torch.arange(self.rows, device=rank_P.device)[:, None]
        return ((rank_P * self.rows + row_B1) * local + token_P).flatten()


def local_length(length: int, size: int) -> int:
    """Tokens of a row of `length` on each of `size` ranks, padding included."""
    return 2 * -(-length // (2 * size))
