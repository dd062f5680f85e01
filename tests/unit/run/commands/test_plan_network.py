"""`automodel plan` warns of groups whose ranks exchange data in every layer and are on several nodes."""

from __future__ import annotations

import logging

import pytest

from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.run.commands.plan import warn_of_network


@pytest.mark.parametrize(
    ("mesh", "gpus", "said"),
    [
        (MeshConfig(ep_size=16), 16, ["mesh.ep_size=16", "50%", "mesh.ep_size=8"]),
        (MeshConfig(ep_size=64), 128, ["mesh.ep_size=64", "88%", "mesh.ep_size=8"]),
        (MeshConfig(tp_size=6), 24, ["mesh.tp_size=6", "67%", "mesh.tp_size=2"]),
        (MeshConfig(ep_size=8), 16, []),
        (MeshConfig(tp_size=4, ep_size=8), 64, []),
        (MeshConfig(tp_size=6), 6, []),
    ],
)
def test_groups_over_several_nodes(mesh: MeshConfig, gpus: int, said: list[str], caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, logger="automodel_cli"):
        warn_of_network(mesh.resolve(gpus))
    records = [record for record in caplog.records if getattr(record, "code", None) == "crosses_nodes"]
    assert len(records) == (1 if said else 0)
    assert all(value in record.getMessage() for record in records for value in said)
