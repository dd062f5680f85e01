"""Machines without the hub: the error names the switch, the cache and the command that fills it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from automodel_cli.config import fix_syntax
from automodel_cli.config.composition import hub
from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.sources.file_readers import load_hub
from automodel_cli.models.checkpoint_io.sequence_classifier import check_classifier
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.hub.source import hf_config
from automodel_cli.models.tokenizer import load_tokenizer


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The libraries as they are under HF_HUB_OFFLINE=1, which they read when they are imported."""
    import datasets
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    return tmp_path


MODEL = ModelConfig(pretrained="nobody/no-model", revision="v 1")


@pytest.mark.parametrize(
    ("call", "keys", "command"),
    [
        (lambda: load_tokenizer(MODEL), ("tokenizer",), "hf download nobody/no-model --revision 'v 1'"),
        (lambda: hf_config(MODEL), ("pretrained",), "hf download nobody/no-model --revision 'v 1'"),
        (lambda: check_classifier("nobody/no-model"), ("folder",), "hf download nobody/no-model"),
        (
            lambda: load_hub(SourceConfig(path="nobody/no-rows")),
            ("data.path",),
            "hf download nobody/no-rows --repo-type dataset --local-dir data/no-rows",
        ),
    ],
    ids=["tokenizer", "config", "reward model", "dataset"],
)
def test_what_is_not_in_the_cache(offline: Path, call: Any, keys: tuple[str, ...], command: str) -> None:
    with pytest.raises(ConfigError) as error:
        call()
    assert isinstance(error.value, DataError) == (keys == ("data.path",)) and error.value.keys == keys
    assert "HF_HUB_OFFLINE=1" in error.value.message and f"HF_HOME={offline}" in error.value.message
    (first, *_) = fix_syntax.alternatives(error.value.fix or "")
    assert (first, fix_syntax.kind(first)) == (command, "command")


def test_the_cache_is_where_the_hub_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Against huggingface_hub, in processes of their own: it reads the environment when it is imported."""
    for given in ({"HF_HOME": str(tmp_path)}, {"XDG_CACHE_HOME": str(tmp_path)}, {"HOME": str(tmp_path)}):
        environment = {k: v for k, v in os.environ.items() if k not in ("HF_HOME", "XDG_CACHE_HOME")} | given
        code = "from huggingface_hub.constants import HF_HOME; print(HF_HOME)"
        theirs = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )
        with monkeypatch.context() as patch:
            for name in ("HF_HOME", "XDG_CACHE_HOME"):
                patch.delenv(name, raising=False)
            for name, value in given.items():
                patch.setenv(name, value)
            assert str(hub.home()) == theirs.stdout.strip()


def test_other_errors_are_not_for_want_of_a_network() -> None:
    assert not hub.is_offline(OSError("config.json is not valid JSON"))
    assert not hub.is_offline(ValueError("unknown model type"))
