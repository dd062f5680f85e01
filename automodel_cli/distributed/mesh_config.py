"""Sizes of the mesh axes: config section, rules, and suggestions of valid sizes.

Torch-free: `automodel check` and the planner compute the layout of a run on n ranks without a process group.

Example: pp_size=2, tp_size=2 and dp_size=null on 16 ranks give dp=4. Ranks 0 and 1 are tp neighbors. Ranks 0-7 are
stage 0 and ranks 8-15 are stage 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from automodel_cli.config.errors import ConfigError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of the mesh, outermost first. Ranks are row-major, so `tp` neighbors have adjacent ranks."""

MAX_SUGGESTED_RANKS = 1 << 20  # Larger numbers of ranks are not suggested.


@dataclass(frozen=True)
class Layout:
    """Resolved sizes of all axes, each at least 1. Expert parallelism reuses the ranks of dp, cp and tp."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Ranks with different sequences."""
        return self.dp_replicate * self.dp_shard

    @property
    def dp_shard_cp(self) -> int:
        """Ranks that share one copy of the parameters."""
        return self.dp_shard * self.cp

    @property
    def dp_cp(self) -> int:
        """Ranks over which gradients are summed."""
        return self.dp * self.cp

    @property
    def ep_shard(self) -> int:
        """Ranks that share one copy of the same experts."""
        # Example: 32 ranks with pp = 2, dp_replicate = 2, dp_shard = 2, cp = 2, tp = 2 and ep = 8. dp = 4, and dense
        # parameters are sharded over dp_shard x cp = 4 ranks. The 16 ranks of a stage hold 16 / 8 = 2 copies of each
        # expert, which ep_shard = 2 shards.
        return self.dp_cp * self.tp // self.ep

    def to_config(self) -> MeshConfig:
        """Return the same layout as a config with every size set."""
        return MeshConfig(self.dp, self.dp_replicate, self.tp, self.pp, self.cp, self.ep)

    def __str__(self) -> str:
        sizes = {"pp": self.pp, "dp": self.dp, "dp_replicate": self.dp_replicate, "cp": self.cp, "tp": self.tp}
        named = [f"{name}={size}" for name, size in (sizes | {"ep": self.ep}).items() if size > 1]
        return " x ".join(named) or "one rank"


@dataclass(frozen=True)
class MeshConfig:
    """Mesh sizes. null: `dp_size` takes the remaining ranks, every other size is 1.

    `dp_size` includes the replicas of `dp_replicate_size` (hybrid sharding). `ep_size` reuses the ranks of other axes.
    """

    dp_size: int | None = None
    """Data-parallel ranks. null: all ranks that the other axes do not use."""
    dp_replicate_size: int | None = 1
    """Replicas of the sharded model among the data-parallel ranks (hybrid sharding). null: 1."""
    tp_size: int | None = 1
    """Tensor-parallel ranks, which shard each layer's matrices."""
    pp_size: int | None = 1
    """Pipeline-parallel ranks, which hold the stages of the model."""
    cp_size: int | None = 1
    """Context-parallel ranks, which shard the tokens of each sequence."""
    ep_size: int | None = 1
    """Expert-parallel ranks. They are ranks of the other axes, so this adds none."""

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
                raise ConfigError(
                    f"{field.name}={size!r} must be null or an integer of at least 1",
                    code="out_of_range",
                    keys=(field.name,),
                    fix=f"mesh.{field.name}={'null' if field.name == 'dp_size' else 1}",
                )

    @property
    def ranks_per_replica(self) -> int:
        """Ranks with the same sequences: tp x cp x pp."""
        return (self.tp_size or 1) * (self.cp_size or 1) * (self.pp_size or 1)

    def resolve(self, world_size: int) -> Layout:
        """Return the size of every axis on `world_size` ranks.

        Raises ConfigError with the violated rule, and the nearest valid sizes and rank counts.
        """
        problem = self._problem(world_size)
        if problem is not None:
            message, keys = problem
            raise ConfigError(
                f"mesh does not fit: {message}", code="mesh_size", keys=keys, fix=self._advice(world_size, keys)
            )
        dp, dp_replicate = world_size // self.ranks_per_replica, self.dp_replicate_size or 1
        return Layout(
            pp=self.pp_size or 1,
            dp_replicate=dp_replicate,
            dp_shard=dp // dp_replicate,
            cp=self.cp_size or 1,
            tp=self.tp_size or 1,
            ep=self.ep_size or 1,
        )

    def num_ranks(self, num_gpus: int) -> int:
        """Return the number of ranks to start on this machine.

        If `dp_size` is set, it determines the number. Otherwise it is the number of GPUs, or without GPUs the smallest
        valid number. Raises ConfigError if there are too few GPUs, or if the sizes do not fit.
        """
        if self.dp_size is not None:
            requested = self.dp_size * self.ranks_per_replica
        elif num_gpus > 0:
            requested = num_gpus
        else:
            requested = next(self._fitting_ranks(start=1), self.ranks_per_replica)
        self.resolve(requested)
        if 0 < num_gpus < requested:
            raise ConfigError(
                f"mesh does not fit: {self._product()} needs {requested} ranks, but this machine has {num_gpus} GPUs",
                code="mesh_size",
                keys=self._set_sizes(),
                fix=self._advice(num_gpus, self._set_sizes()),
            )
        return requested

    def _problem(self, world_size: int) -> tuple[str, tuple[str, ...]] | None:
        """Return the first violated rule on this many ranks and the fields that it involves."""
        replica, ep, dp_replicate = self.ranks_per_replica, self.ep_size or 1, self.dp_replicate_size or 1
        replica_sizes = [name for name in ("tp_size", "cp_size", "pp_size") if (getattr(self, name) or 1) > 1]
        if self.dp_size is not None and self.dp_size * replica != world_size:
            needed = self.dp_size * replica
            return f"{self._product()} needs {needed} ranks, but there are {world_size}", self._set_sizes()
        if world_size % replica:
            product = " x ".join(f"{name}={getattr(self, name)}" for name in replica_sizes)
            return f"{world_size} ranks are not divisible by {product}", tuple(replica_sizes)
        dp = world_size // replica
        # dp_replicate = dp would leave nothing to shard.
        if dp_replicate > 1 and dp_replicate >= dp:
            rule = f"must be smaller than the {dp} data-parallel ranks; whole copies on every rank are parallelizer=ddp"
            return f"dp_replicate_size={dp_replicate} {rule}", ("dp_replicate_size",)
        if dp % dp_replicate:
            return f"{dp} data-parallel ranks are not divisible by dp_replicate_size={dp_replicate}", (
                "dp_replicate_size",
            )
        outside_pp = world_size // (self.pp_size or 1)
        if outside_pp % ep:
            stage = "of one pipeline stage " if (self.pp_size or 1) > 1 else ""
            return f"the {outside_pp} ranks {stage}are not divisible by ep_size={ep}", ("ep_size",)
        return None

    def _set_sizes(self) -> tuple[str, ...]:
        """Return the fields that determine a number of ranks."""
        names = [name for name in ("pp_size", "tp_size", "cp_size") if (getattr(self, name) or 1) > 1]
        return (*names, "dp_size") if self.dp_size is not None else tuple(names)

    def _product(self) -> str:
        return " x ".join(f"{name}={getattr(self, name)}" for name in self._set_sizes()) or "dp_size=1"

    def _advice(self, world_size: int, keys: tuple[str, ...]) -> str:
        """Return the nearest valid values of one field on these ranks, then valid rank counts."""
        per_field = [list(self._valid_values(name, world_size))[:2] for name in keys]
        options = [option for _, option in sorted(option for options in per_field for option in options)][:3]
        below = [n for n in range(world_size - 1, 0, -1) if self._problem(n) is None][:1]
        above = next(self._fitting_ranks(start=world_size + 1), None)
        counts = [str(n) for n in (*below, above) if n is not None]
        if counts:
            options.append(f"start {' or '.join(counts)} ranks")
        return ", or ".join(options) or "mesh={}"

    def _valid_values(self, name: str, world_size: int) -> Iterator[tuple[float, str]]:
        """Yield (distance, assignment) for valid values of one field, nearest first."""
        current = getattr(self, name) or 1
        options = []
        for size in range(1, world_size + 1):
            if size != current and replace(self, **{name: size})._problem(world_size) is None:
                # By ratio: 4 is as near to 8 as 16 is.
                options.append((abs(math.log(size / current)), f"mesh.{name}={size}"))
        yield from sorted(options)

    def _fitting_ranks(self, start: int) -> Iterator[int]:
        """Yield valid rank counts for these sizes, in ascending order from `start`."""
        unit = self.ranks_per_replica
        # The next multiple of a replica: ceil(start / unit) * unit.
        first = -(-start // unit) * unit
        yield from (n for n in range(first, MAX_SUGGESTED_RANKS, unit) if self._problem(n) is None)
