"""The pipeline section: what it refuses, and fixes that work when they are pasted after the command."""

from __future__ import annotations

import re

import pytest

from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import alternatives
from automodel_cli.pipelining.error_keys import respell

RUN = ["train.global_batch_size=8", "train.microbatch_size=1", "model.config.num_hidden_layers=8"]
# what is on the command line after `-c quickstart mesh.pp_size=2 mesh.dp_size=1` and this
REFUSED = {
    "layers": ["pipeline=1f1b", "pipeline.layers_per_stage=0"],
    "group": ["pipeline=zbv", "pipeline.microbatch_group_size=4"],
    "group of nothing": ["pipeline=interleaved_1f1b", "pipeline.microbatch_group_size=0"],
    "two ways": ["pipeline=1f1b", "pipeline.layers_per_stage=4", "pipeline.layout=Et*4|t*4L"],
    "name": ["pipeline=1f1b", "pipeline.schedule=zb-h3"],
    "nothing": ["pipeline=1f1b", "pipeline.schedule=null"],
    "stages": ["pipeline=1f1b", "pipeline.layers_per_stage=1"],
}


def _refusal(words: list[str]) -> ConfigError | None:
    try:
        check_config(compose("quickstart", ["mesh.pp_size=2", "mesh.dp_size=1", *RUN, *words]))
    except ConfigError as error:
        return error
    return None


@pytest.mark.parametrize("name", REFUSED)
def test_fixes_work_when_pasted(name: str):
    error = _refusal(REFUSED[name])
    assert error is not None and error.fix is not None
    pasted = alternatives(error.fix)[0].split()
    assert all(re.fullmatch(r"pipeline\.\w+=\S+", word) for word in pasted), error.fix
    assert _refusal([*REFUSED[name], *pasted]) is None


def test_keys_that_stand_alone_are_respelled_and_no_others():
    names = {"schedule": "pp_schedule", "layout": "pipeline.layout"}
    text = "schedule=a, or mesh.schedule=b layout=c; pp_schedule=d, a schedule is x-layout=e"
    assert respell(text, names) == (
        "pp_schedule=a, or mesh.schedule=b pipeline.layout=c; pp_schedule=d, a schedule is x-layout=e"
    )
