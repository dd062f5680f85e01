"""docs/api.md: every name on the page imports, and no documented method of AutoPipeline is missing."""

from __future__ import annotations

import inspect
import pkgutil
import re
from pathlib import Path

from automodel_cli.pipelining.auto_pipeline import AutoPipeline

PAGE = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
NAMES = re.findall(r"^\| `(automodel_cli\.[\w.]+)` \| (.*) \|$", PAGE, re.M)


def test_every_name_imports_and_has_a_line():
    assert len(NAMES) == len({name for name, _ in NAMES}) > 50
    for name, line in NAMES:
        assert pkgutil.resolve_name(name) is not None and len(line) > 5


def test_the_page_has_every_method_and_keyword_that_a_library_user_calls():
    listed = {name.rpartition(".")[2] for name, _ in NAMES if ".AutoPipeline." in name}
    # what recipes ask of `Stages`
    protocol = {"pp_group", "schedule_svg", "stage_owners", "boundary_dtype", "takes", "forward_size", "in_float32"}
    assert {name for name in dir(AutoPipeline) if not name.startswith("_")} - protocol == listed
    renamed = set(re.findall(r"`(pp_\w+)` is", PAGE))
    assert renamed <= set(inspect.signature(AutoPipeline).parameters)
