"""Reproducible kernels: what torch and cuBLAS are told."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from automodel_cli.config.errors import ConfigError
from automodel_cli.launch import environment
from automodel_cli.training.checkpoint import rng
from tests.errors import raises

WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(environment.OWN, "")
    monkeypatch.setenv(WORKSPACE, "")  # undone at the end, whatever is set in between
    yield
    torch.use_deterministic_algorithms(False)


def test_cublas_gets_a_workspace_of_a_fixed_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(WORKSPACE)
    rng.make_deterministic()
    assert os.environ[WORKSPACE] == ":4096:8" and torch.are_deterministic_algorithms_enabled()
    assert WORKSPACE not in environment.of_user(), "a server that the run starts has its own"


@pytest.mark.parametrize("given", [":16:8", ":4096:8"])
def test_a_workspace_of_the_users_own_stays(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, given)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    rng.make_deterministic()
    assert os.environ[WORKSPACE] == environment.of_user()[WORKSPACE] == given


def test_one_that_cublas_is_not_reproducible_with_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, ":1024:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with raises(ConfigError, "invalid_environment", values=("CUBLAS_WORKSPACE_CONFIG=:1024:2",)) as caught:
        rng.make_deterministic()
    assert caught.value.keys == ("train.deterministic",)
    assert (caught.value.fix or "").startswith("export CUBLAS_WORKSPACE_CONFIG=:4096:8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    rng.make_deterministic()
