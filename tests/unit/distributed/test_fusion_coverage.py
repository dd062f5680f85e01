"""Fused kernels cover the parts of each family that the recorded table names, on every supported transformers."""

from __future__ import annotations

import copy
import logging
import sys
from pathlib import Path

import pytest
import transformers
from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.fusion import patterns
from automodel_cli.distributed.fusion.expected import EXPECTED
from automodel_cli.distributed.fusion_coverage import check_coverage, coverage_of, family_of
from automodel_cli.models.probes.fused_parts import fused_parts
from tests import tiny
from tests.errors import raises

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from support_table import families, with_usual_fields

pytestmark = pytest.mark.slow

RELEASE = tuple(int(part) for part in transformers.__version__.split(".")[:2])
LATER = {"codegen": ("attention", (5, 24)), "gptj": ("attention", (5, 24))}
"""Kinds that a family has since a release. Can go when that is the oldest supported release."""


CONFIGS = {config.get_text_config().model_type: config for _, config, _ in families()}
INSTALLED = sorted(CONFIGS.keys() & EXPECTED.keys())


@pytest.mark.parametrize("family", INSTALLED)
def test_each_family_keeps_its_fused_parts(family: str) -> None:
    kind, since = LATER.get(family, ("", (0, 0)))
    expected = [k for k in EXPECTED[family].split() if k != kind or since <= RELEASE]
    try:
        found = fused_parts(copy.deepcopy(CONFIGS[family]))
    except Exception:  # default configs that leave fields open
        found = fused_parts(with_usual_fields(CONFIGS[family]))
    assert found == expected


def test_the_table_names_families_of_the_library() -> None:
    assert len(INSTALLED) > 140


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_lost_rotary_fusion_is_reported(family: str, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """As on transformers 5.24, where a decorator hid the code of attention forwards."""
    part = tiny.build_hf(family)
    assert family_of(nn.ModuleList([part])) == family and coverage_of(part)["rotary"]
    check_coverage(part, family, by_name=True)
    monkeypatch.setattr(patterns, "_rotations", lambda forward: [])
    with caplog.at_level(logging.WARNING):
        check_coverage(part, family, by_name=False)
    (record,) = [record for record in caplog.records if getattr(record, "code", None) == "fusion_lost"]
    assert "rotary" in record.getMessage() and family in record.getMessage() and "norm" not in record.getMessage()
    with raises(ConfigError, "kernel_unavailable", keys=("parallelizer.enable_compile",), values=("rotary",)):
        check_coverage(part, family, by_name=True)
    check_coverage(part, "a family without a line", by_name=True)


def test_parts_that_a_stage_lacks_are_not_lost() -> None:
    layer = tiny.build_hf("llama").model.layers[0].mlp
    assert coverage_of(nn.ModuleList([layer])) == {"gate": True}
    check_coverage(nn.ModuleList([layer]), "llama", by_name=True)
