"""Errors about values that come from the environment, or from others."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.plain_text import visible

SECRET = "sk-" + "q7Zw" * 20
CONFIG = """
defaults: [quickstart, _self_]
optimizer: {lr: "${oc.env:MY_SECRET}", betas: ["${oc.env:MY_SECRET}", 0.9]}
model: {dtype: "pre-${oc.env:MY_SECRET}", attn_implementation: "${model.dtype}"}
seed: ${oc.env:MY_SECRET}
run_name: /${oc.env:MY_SECRET}
logging: {trackers: ["${oc.env:MY_SECRET}"]}
"""


def test_no_error_contains_a_value_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_SECRET", SECRET)
    Path("x.yaml").write_text(CONFIG)
    with pytest.raises(ConfigError) as error:
        check_config(compose("x.yaml", ["data.seq_len=${oc.env:MY_SECRET}"]))
    said = str(error.value) + error.value.message
    assert {"optimizer.lr", "seed", "data.seq_len", "model.dtype"} <= set(error.value.keys)
    assert not any(SECRET[:n] in said for n in range(4, len(SECRET))) and "${oc.env:MY_SECRET}" in said


@pytest.mark.parametrize("cut", [4, 10, 47, len(SECRET)])
@pytest.mark.parametrize("ellipsis", ["…", "..."])
def test_a_value_that_is_cut_short_is_hidden_too(monkeypatch: pytest.MonkeyPatch, cut: int, ellipsis: str) -> None:
    monkeypatch.setenv("MY_SECRET", SECRET)
    assert OmegaConf.create({"a": "${oc.env:MY_SECRET}"}).a == SECRET
    error = ConfigError(
        f"got {SECRET[:cut]}{ellipsis} and more{ellipsis}", origin=f"a={SECRET}", fix=f"ask for {SECRET}"
    )
    assert str(error).splitlines() == [
        f"got ${{oc.env:MY_SECRET}}{ellipsis} and more{ellipsis}",
        "  from  a=${oc.env:MY_SECRET}",
        "  try   ask for ${oc.env:MY_SECRET}",
    ]


def test_the_resolver_is_omegaconfs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOT_SET", raising=False)
    monkeypatch.setenv("SHORT", "1")
    config = OmegaConf.create(
        {"a": "${oc.env:NOT_SET,3}", "b": "${oc.env:NOT_SET,null}", "c": "${oc.env:SHORT}", "d": "${oc.env:NOT_SET}"}
    )
    assert (config.a, config.b, config.c) == ("3", None, "1")
    with pytest.raises(Exception, match="NOT_SET"):
        _ = config.d
    assert str(ConfigError("1 row")) == "1 row"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc é 中 🙂", "a\tb\nc é 中 🙂"),
        ("\x1b[2J\x1b]0;x\x07", "\\x1b[2J\\x1b]0;x\\x07"),
        ("a\rb\x08\x9b31m\x7f", "a\\rb\\x08\\x9b31m\\x7f"),
        ("a\u202eb\u2066", "a\\u202eb\\u2066"),
    ],
)
def test_a_terminal_is_given_no_orders(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert str(ConfigError(text)) == shown
