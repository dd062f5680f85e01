"""Bring whole matrices to one rank each, and their results back to the shards.

A round takes up to one matrix per rank of a mesh. With one sharded axis, each direction is one all-to-all. With more
axes (tensor parallelism, hybrid sharding), pieces travel one axis after the other, in the groups that the mesh has. No
process group is created.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from automodel_cli.distributed.expert_parallel import token_dispatcher
from automodel_cli.training.torch_compat import shard_of

Coordinate = tuple[int, ...]
"""Position of a rank on each axis of a mesh."""


class Piece(NamedTuple):
    """A shard of matrix number `matrix` of a round, at the rank `shard`."""

    matrix: int
    shard: Coordinate


Held = dict[Piece, Tensor]
"""Pieces that this rank has at the moment, flat."""


@dataclass(frozen=True)
class _Hop:
    """One all-to-all over one axis: the pieces for each rank of the axis, and from each."""

    group: dist.ProcessGroup
    send: list[list[Piece]]
    receive: list[list[Piece]]


def rounds_of(params: Sequence[DTensor]) -> list[MatrixRound]:
    """Return rounds over all matrices of one mesh, balanced by the cost of Newton-Schulz iterations.

    Every rank of the mesh must pass the same parameters in the same order.

    Matrices are sorted by cost, so that those of one round take about the same time. Every second round assigns them in
    reverse, so that the first rank does not get the largest matrix of each round.
    """
    # Example: 2 ranks and matrices of cost 9, 8, 5, 1. Round 0: 9 on rank 0, 8 on rank 1. Round 1 in reverse: 5 on rank
    # 1, 1 on rank 0. The sums are 10 and 13. Without the reversal they would be 14 and 9.
    mesh = params[0].device_mesh
    ranks = list(itertools.product(*map(range, mesh.shape)))
    by_cost = sorted(params, key=lambda param: cost(param.shape), reverse=True)  # stable: alike on every rank
    rounds = []
    for number, first in enumerate(range(0, len(by_cost), len(ranks))):
        owners = ranks if number % 2 == 0 else ranks[::-1]
        rounds.append(MatrixRound(by_cost[first : first + len(ranks)], owners))
    return rounds


def cost(shape: Sequence[int]) -> int:
    """Return the FLOPs of one Newton-Schulz iteration, up to a factor: r^2 (4 c + 2 r) for r <= c."""
    # 4096 x 1024: A = X X^T is 1024 x 1024, so the cost grows with the square of the smaller side.
    small, large = sorted(shape)
    return small * small * (4 * large + 2 * small)


class MatrixRound:
    """Up to one matrix per rank of a mesh: `params[i]` belongs to `owners[i]`.

    Attributes:
        own: the matrix of this rank, or None.
    """

    def __init__(self, params: Sequence[DTensor], owners: Sequence[Coordinate]):
        self.params = list(params)
        mesh = params[0].device_mesh
        self._me = tuple(mesh.get_coordinate() or ())
        self._owners = list(owners[: len(params)])
        self._slices = _Slices(self.params, mesh)
        self._number = self._owners.index(self._me) if self._me in self._owners else None
        self.own = None if self._number is None else self.params[self._number]
        self._to_owners = self._hops(mesh, gather=True)
        self._to_shards = self._hops(mesh, gather=False)

    def gather(self, shards: Sequence[Tensor]) -> Callable[[], Tensor | None]:
        """Start to send `shards[i]` of `params[i]` to its owner. The result returns the full matrix `own`.

        Collective over the mesh.
        """
        # Flat, because one all-to-all carries shards of several shapes.
        held = {Piece(i, self._me): shard.reshape(-1) for i, shard in enumerate(shards)}
        arriving = _travel(held, self._to_owners, shards[0], self._numel)

        def full() -> Tensor | None:
            pieces = arriving()
            if self.own is None:
                return None
            whole = shards[0].new_empty(self.own.shape)
            for piece, values in pieces.items():
                if piece.matrix == self._number:
                    view = whole[self._slices(piece)]
                    # Shard(0) fills rows, Shard(1) columns. A column block of the matrix is not contiguous, so it is
                    # copied by shape.
                    view.copy_(values.view(view.shape))
            return whole

        return full

    def scatter(self, result: Tensor | None, like: Tensor) -> Callable[[], list[Tensor]]:
        """Start to send `result` of the matrix `own` to the shards. The result returns a shard for each of `params`.

        Collective over the mesh. `like`: any tensor of the dtype and device of the results.
        """
        held: Held = {}
        if self._number is not None and result is not None:
            pieces = [Piece(self._number, shard) for shard in self._slices.ranks]  # Replicas receive equal pieces.
            held = {piece: result[self._slices(piece)].reshape(-1) for piece in pieces}
        arriving = _travel(held, self._to_shards, like, self._numel)

        def shards() -> list[Tensor]:
            pieces = arriving()
            shapes = [param.to_local().shape for param in self.params]
            return [pieces[Piece(i, self._me)].view(shape) for i, shape in enumerate(shapes)]

        return shards

    def _numel(self, piece: Piece) -> int:
        rows, columns = self._slices(piece)
        return int((rows.stop - rows.start) * (columns.stop - columns.start))

    def _hops(self, mesh: DeviceMesh, *, gather: bool) -> list[_Hop]:
        """Return the transfers of this rank, one for each axis on which a piece moves.

        Every rank simulates all pieces and therefore knows the sizes of messages without communication.
        """
        axes = range(mesh.ndim)
        where = {
            piece: (piece.shard if gather else self._owners[piece.matrix])
            for i in range(len(self.params))
            for piece in (Piece(i, shard) for shard in self._slices.ranks)
            # Of equal replicas, the owner's sends.
            if not gather or self._slices.is_in_replica(i, piece.shard, self._owners[i])
        }
        # Example: mesh (2, 2), axes (shard, tp), owner (0, 1), piece at (1, 0). Gather goes over tp first: (1, 0) ->
        # (1, 1), then over shard: (1, 1) -> (0, 1). Scatter goes the same way back, so the axes are in opposite order.
        hops = []
        for axis in reversed(axes) if gather else axes:
            size = mesh.size(axis)
            hop = _Hop(mesh.get_group(axis), [[] for _ in range(size)], [[] for _ in range(size)])
            moves = False
            for piece, before in where.items():
                target = self._owners[piece.matrix] if gather else piece.shard
                after = (*before[:axis], target[axis], *before[axis + 1 :])
                moves |= after != before
                if before == self._me:
                    hop.send[after[axis]].append(piece)
                if after == self._me:
                    hop.receive[before[axis]].append(piece)
                where[piece] = after
            hops += [hop] if moves else []
        return hops


class _Slices:
    """Rows and columns of each shard of the matrices of a round."""

    def __init__(self, params: Sequence[DTensor], mesh: DeviceMesh):
        self.ranks = list(itertools.product(*map(range, mesh.shape)))
        self._replicated = [[placement.is_replicate() for placement in param.placements] for param in params]
        shapes = {(param.shape, param.placements) for param in params}
        known = {key: {rank: shard_of(key[0], mesh, rank, key[1]) for rank in self.ranks} for key in shapes}
        self._of = [known[param.shape, param.placements] for param in params]

    def __call__(self, piece: Piece) -> tuple[slice, ...]:
        return self._of[piece.matrix][piece.shard]

    def is_in_replica(self, matrix: int, shard: Coordinate, owner: Coordinate) -> bool:
        """Return whether `shard` is in the replica of `owner`."""
        axes = zip(self._replicated[matrix], shard, owner, strict=True)
        return all(ours == theirs for replicated, ours, theirs in axes if replicated)


def _travel(held: Held, hops: Sequence[_Hop], like: Tensor, numel: Callable[[Piece], int]) -> Callable[[], Held]:
    """Start the transfers of a round. All but the last one are awaited here."""
    arrived: Callable[[], Held] = lambda: held  # noqa: E731
    for hop in hops:
        arrived = _one_hop(arrived(), hop, like, numel)
    return arrived


def _one_hop(
    held: Mapping[Piece, Tensor], hop: _Hop, like: Tensor, numel: Callable[[Piece], int]
) -> Callable[[], Held]:
    leaving = [held[piece] for to_rank in hop.send for piece in to_rank]
    sizes = [[sum(map(numel, pieces)) for pieces in of_ranks] for of_ranks in (hop.send, hop.receive)]
    rows = torch.cat(leaving) if leaving else like.new_empty(0)
    arriving = token_dispatcher.exchange(rows, sizes[0], sizes[1], hop.group)
    pieces = [piece for of_rank in hop.receive for piece in of_rank]
    return lambda: dict(zip(pieces, arriving().split([numel(piece) for piece in pieces]), strict=True))


def is_distributed(param: Tensor) -> TypeGuard[DTensor]:
    """Return whether several ranks hold `param` as a DTensor."""
    return isinstance(param, DTensor) and param.device_mesh.size() > 1
