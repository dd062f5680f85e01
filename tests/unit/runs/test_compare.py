"""Comparison of the configs of two runs."""

from __future__ import annotations

from pathlib import Path

from automodel_cli.runs.compare import config_with_origins


def test_names_with_dots_and_numbers_have_their_values(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("lora:\n  rank_pattern:\n    mlp.experts.down_proj: 8  # x.yaml:3\nweights:\n  1000: 0.5\n")
    assert config_with_origins(path) == {
        "lora.rank_pattern.mlp.experts.down_proj": "8\nx.yaml:3",
        "weights.1000": "0.5\n",
    }
