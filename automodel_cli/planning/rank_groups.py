"""Which ranks communicate in each group of a layout, seen from rank 0."""

from __future__ import annotations

from dataclasses import dataclass

from automodel_cli.distributed.mesh_config import Layout


# Example: the mesh of `mesh_config.Layout.ep_shard`, 16 ranks per stage. tp 0 1, cp 0 2, shard 0 2 4 6, replicate 0 8,
# ep 0 to 7, ep_shard 0 8. The next stage begins at rank 16. Which ranks a group has decides over which links it
# communicates.
@dataclass(frozen=True)
class Groups:
    """Global ranks of the groups of rank 0. From the inside: tp, cp, dp_shard, dp_replicate. Experts use neighbors."""

    layout: Layout

    @property
    def tp(self) -> range:
        return range(self.layout.tp)

    @property
    def cp(self) -> range:
        return range(0, self.layout.cp * self.layout.tp, self.layout.tp)

    @property
    def shard(self) -> range:
        return range(0, self.layout.dp_shard_cp * self.layout.tp, self.layout.tp)

    @property
    def replicate(self) -> range:
        one = self.layout.dp_shard_cp * self.layout.tp
        return range(0, self.layout.dp_replicate * one, one)

    @property
    def ep(self) -> range:
        return range(self.layout.ep)

    @property
    def ep_shard(self) -> range:
        return range(0, self.layout.ep_shard * self.layout.ep, self.layout.ep)

    @property
    def stages(self) -> tuple[int, int]:
        """Two ranks that pass activations on."""
        return 0, self.layout.world_size // self.layout.pp
