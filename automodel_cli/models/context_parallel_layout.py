"""Layout of a microbatch's rows on context-parallel ranks.

Every rank receives full rows. A row is padded to a multiple of twice the number of ranks and split into that many
chunks. A rank keeps one early chunk and its mirror image, so that causal attention costs the same on all ranks.
Example: 2 ranks and a row of 8 tokens give chunks of 2 tokens. Rank 0 has tokens 0, 1, 6, 7 and rank 1 has tokens 2, 3,
4, 5.

Labels are shifted before, position ids count within documents, and the padding is a separate document. Therefore only
attention depends on the layout. It receives the `Context` as the keyword `context`, which is correct with several
microbatches in flight and with recomputation.

Shapes: B rows of T tokens, P tokens padded, t = P / ranks local tokens of a row, N = B*t.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_cli.data.batch import dual_chunks


class ContextGroup(Protocol):
    """The ranks that share rows, and their communication. Implemented by `distributed.context_parallel`."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def ring(self) -> bool:
        """Whether attention passes keys around a ring instead of gathering them."""
        ...

    def pass_on(self, x: Tensor) -> Callable[[], Tensor]:
        """Start sending `x` to the next rank. The returned function waits for the previous rank's tensor. No gradients.
        Collective."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """Concatenate `[n, ...]` of all ranks to `[size * n, ...]`. Backward reduce-scatters. Collective."""
        ...

    def gather_results(self, x: Tensor) -> Tensor:
        """Concatenate results that every rank uses in the same way. Backward takes the local slice. Collective."""
        ...


class OneProcess:
    """A `ContextGroup` of one process, without communication."""

    rank, size, ring = 0, 1, False

    def gather(self, x: Tensor) -> Tensor:
        return x

    def gather_results(self, x: Tensor) -> Tensor:
        return x

    def pass_on(self, x: Tensor) -> Callable[[], Tensor]:
        return lambda: x


class Context:
    """The layout of one microbatch on one rank."""

    def __init__(
        self,
        group: ContextGroup,
        shape: tuple[int, int],
        cu_seqlens: Sequence[int] | Tensor | None,
        device: torch.device,
        owners: tuple[tuple[int, ...], ...] | None = None,
    ):
        """Compute the layout.

        Args:
            shape: (B, T) of the full batch.
            cu_seqlens: document boundaries of the full batch. None: one document per row. A CUDA tensor synchronizes
                the host.
            owners: chunks of each rank. None: `dual_chunks(group.size)`.
        """
        self.group = group
        # Example with 2 ranks and T = 7: T is padded to 8, chunks have 2 tokens, owners = ((0, 3), (1, 2)).
        self.owners = owners or dual_chunks(group.size)
        num_chunks = sum(len(chunks) for chunks in self.owners)
        self.rows, self._length = shape
        self.tokens = local_length(self._length, num_chunks // 2) * (num_chunks // 2)
        self.chunk = self.tokens // num_chunks
        # One row of 7 tokens with documents of 3 and 4: cu_seqlens 0 3 7 becomes 0 3 7 8. Two such rows: 0 3 7 8 11 15
        # 16.
        self.bounds = self._padded_bounds(cu_seqlens)
        # Token order after concatenating the ranks: 0 1 6 7 2 3 4 5. `_host_where_P` is the inverse: 0 1 4 5 6 7 2 3.
        order_P = torch.cat([torch.arange(self.chunk) + j * self.chunk for chunks in self.owners for j in chunks])
        self._host_where_P = order_P.argsort()
        self._where_P = self._host_where_P.to(device)
        self._local_t = order_P.view(group.size, -1)[group.rank].to(device)

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks of each row on this rank, in the order of its local tokens."""
        return self.owners[self.group.rank]

    def _padded_bounds(self, cu_seqlens: Sequence[int] | Tensor | None) -> tuple[int, ...]:
        """Return document boundaries over the B*P padded tokens."""
        length, padding = self._length, self.tokens - self._length
        boundaries = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
        if boundaries is None:
            boundaries = range(0, self.rows * length + 1, length)
        # Shift boundaries by the padding of all earlier rows, and add the padding of each row as a document.
        bounds = [0]
        for start, end in itertools.pairwise(boundaries):
            if end > start:
                bounds.append(end + start // length * padding)
                if padding and end % length == 0:
                    bounds.append(bounds[-1] + padding)
        return tuple(bounds)

    def local(self, x_BT: Tensor, fill: int) -> Tensor:
        """Return the local tokens of a full column `[B, T, ...]`. Padding is `fill`."""
        after = (0, 0) * (x_BT.ndim - 2)
        return F.pad(x_BT, (*after, 0, self.tokens - self._length), value=fill).index_select(1, self._local_t)

    def local_label_positions(self, label_positions_S: Tensor) -> Tensor:
        """Map positions among the B*T tokens (host memory) to the local ones among B*t tokens, in order."""
        # Labels at 0, 1, 3, 4, 5 of the row above: rank 0 holds tokens 0 1 6 7 and gets 0, 1. Rank 1 holds 2 3 4 5 and
        # gets 1, 2, 3.
        row_S, token_S = label_positions_S // self._length, label_positions_S % self._length
        size = self.tokens // self.group.size
        # Position in the concatenation of all ranks, relative to this rank's first token.
        place_S = self._host_where_P[token_S] - self.group.rank * size
        is_local_S = (place_S >= 0) & (place_S < size)
        # Sorted, because the head expects positions in ascending order, and the local order differs from that of the
        # row.
        local = (row_S * size + place_S)[is_local_S].sort().values
        return local.to(self._local_t.device, non_blocking=True)

    def local_positions(self, position_ids_BT: Tensor) -> Tensor:
        """Return the local position ids. Padding counts from 0 like a document."""
        padding = torch.arange(self.tokens - self._length, device=position_ids_BT.device)
        whole_BP = torch.cat([position_ids_BT, padding.expand(self.rows, -1)], 1)
        return whole_BP.index_select(1, self._local_t)

    def local_document_lengths(self) -> Tensor:
        """Return the length of each local token's full document, `[B, t]`. Padding counts as a document."""
        lengths = torch.tensor([end - start for start, end in itertools.pairwise(self.bounds)])
        # Documents of 3, 4 and 1 tokens (padding): 3 3 3 4 4 4 4 1. Rank 0 takes 3 3 4 1.
        whole_BP = lengths.repeat_interleave(lengths).view(self.rows, self.tokens)
        return whole_BP.to(self._local_t.device).index_select(1, self._local_t)

    def local_inputs(self, input_ids_BT: Tensor, position_ids_BT: Tensor) -> dict[str, object]:
        """Return the model inputs: local tokens, and the context instead of document boundaries."""
        positions_Bt = self.local_positions(position_ids_BT)
        return {"input_ids": self.local(input_ids_BT, 0), "position_ids": positions_Bt, "context": self}

    def gather_rows(self, x_Bt: Tensor) -> Tensor:
        """Gather local results `[B, t, ...]` to `[B, T, ...]` in row order on all ranks. Collective."""
        # [R * B, t, ...] -> [R, B, t, ...] -> [B, R * t, ...] -> row order without padding [B, T, ...]
        gathered = self.group.gather_results(x_Bt.contiguous()).unflatten(0, (self.group.size, self.rows))
        result: Tensor = gathered.transpose(0, 1).flatten(1, 2).index_select(1, self._where_P[: self._length])
        return result

    def global_index(self) -> Tensor:
        """Return the index of each local token in the flat full rows of P tokens, `[B*t]`."""
        row_B1 = torch.arange(self.rows, device=self._local_t.device)[:, None]
        return (row_B1 * self.tokens + self._local_t).flatten()

    def gathered_index(self) -> Tensor:
        """Return the index of each token of the full rows after `group.gather` of the flat local tokens, `[B*P]`."""
        local = self.tokens // self.group.size
        rank_P, token_P = self._where_P // local, self._where_P % local
        row_B1 = torch.arange(self.rows, device=rank_P.device)[:, None]
        # `group.gather` concatenates ranks, each with B rows of t tokens: index = (rank * B + row) * t + token.
        return ((rank_P * self.rows + row_B1) * local + token_P).flatten()


def local_length(length: int, size: int) -> int:
    """Return the number of tokens of a row on each of `size` ranks, padding included."""
    # 7 tokens on 2 ranks: ceil(7 / 4) = 2 tokens per chunk, two chunks, 4 tokens per rank.
    return 2 * -(-length // (2 * size))
