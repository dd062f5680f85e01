"""Which parts of a model the fused kernels cover, compared with the recorded table of families.

Detection is structural, so a rename in transformers can make it find nothing. The model then computes the same, only
slower, and no error shows it. The table (`expected.py`) makes the loss visible.
"""

from __future__ import annotations

import torch
from torch import nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.warn import warn
from automodel_cli.distributed.expert_parallel.apply import is_experts
from automodel_cli.distributed.expert_parallel.grouped_mlp import GatedExperts
from automodel_cli.distributed.expert_parallel.router_detection import routers_in, rule_of
from automodel_cli.distributed.fusion import patterns
from automodel_cli.distributed.fusion.compiled_regions import FusibleRegion, R
from automodel_cli.distributed.fusion.expected import EXPECTED

KINDS = ("norm", "gate", "rotary", "router", "experts")


def coverage_of(part: nn.Module) -> dict[str, bool]:
    """Return kind -> whether a kernel covers it, for the kinds of `KINDS` that `part` contains.

    Measures one module per class. Parameters may be on the meta device. The part is not changed.
    """
    found: dict[str, bool] = {}

    def add(kind: str, is_covered: bool) -> None:
        found[kind] = found.get(kind, False) or is_covered

    regions: list[str] = []

    def note(region: FusibleRegion[R]) -> None:
        regions.append(region.name.split()[0])

    with torch.device("cpu"):  # Device of the measurement.
        for module in {type(module): module for module in part.modules() if "forward" not in vars(module)}.values():
            for kind in patterns.candidate_kinds(module):
                add(kind, False)
            patterns.fuse_module(module, note)
        for block in {type(block): block for block in part.modules()}.values():
            for _, router in routers_in(block):
                add("router", rule_of(router) is not None)
            for experts in (child for child in block.children() if is_experts(child)):
                add("experts", GatedExperts.of(experts, len(next(experts.parameters())), None) is not None)
    for kind in regions:
        add(kind, True)
    return found


def check_coverage(part: nn.Module, family: str, *, by_name: bool) -> None:
    """Compare a part with the table. Families outside the table are not checked.

    Warns about kinds that are in the part and in the table, but not covered. Raises ConfigError instead if `by_name`:
    the config names `enable_compile=fused_ops`.
    """
    expected = EXPECTED.get(family, "").split()
    lost = [kind for kind, is_covered in coverage_of(part).items() if not is_covered and kind in expected]
    if not lost:
        return
    text = (
        f"fused ops of {family} are lost with the installed transformers: {', '.join(lost)}. Releases that the tests "
        "run with have them. Results are equal, and steps take longer"
    )
    if by_name:
        raise ConfigError(
            text,
            code="kernel_unavailable",
            keys=("parallelizer.enable_compile",),
            fix="parallelizer.enable_compile=auto",
        )
    warn("fusion_lost", "%s", text)


def family_of(part: nn.Module) -> str:
    """Return `model_type` of the transformers model in a part, or "" if there is none."""
    for module in part.modules():
        config = vars(module).get("config")
        if config is not None and hasattr(config, "get_text_config"):
            return str(config.get_text_config().model_type)
    return ""
