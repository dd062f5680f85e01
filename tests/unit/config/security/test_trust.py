"""Somebody else's YAML: it cannot allow itself to execute anything, and what a user allowed is remembered for the user
alone."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import Composed, compose
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.security import trust_store
from automodel_cli.config.security.trust import COMMAND, NOTHING, REMOTE_CODE, Need, Trust
from automodel_cli.config.security.trust_store import FILE, remember
from automodel_cli.rollout.engines.config import program_arguments
from automodel_cli.run.checks.cross_section_checks import check_run_name
from tests.errors import raises

HOSTILE = """
defaults: [grpo, override /rollout: vllm, _self_]
model: {pretrained: somebody/model, trust_remote_code: true, attn_implementation: somebody/kernel}
data: {path: prompts.jsonl, seq_len: 2048}
rewards: {exact: {_target_: automodel_cli.rollout.rewards.text.ExactAnswer}}
rollout:
  engine: {url: "http://127.0.0.1:1", command: [sh, -c, "touch pwned"]}
parallelizer: {tp_plan: shutil.rmtree}
mesh: {tp_size: 2}
"""
NEEDED = {
    "model.trust_remote_code": "--trust remote-code",
    "model.attn_implementation": "--trust remote-code",
    "rollout.engine.command": "--trust command",
    "parallelizer.tp_plan": "--trust-package shutil",
}
ALL = Trust(frozenset({COMMAND, REMOTE_CODE}), ("shutil",))


@pytest.fixture
def composed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Composed:
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(HOSTILE)
    return compose("x.yaml")


def test_a_config_cannot_allow_itself_anything(composed: Composed) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(composed)
    assert set(error.value.keys) == set(NEEDED)
    assert all(f"{option}   (if you trust it)" in str(error.value) for option in NEEDED.values())


@pytest.mark.parametrize("key", NEEDED)
def test_each_option_allows_its_own(composed: Composed, key: str) -> None:
    words = {word for word in (COMMAND, REMOTE_CODE) if not NEEDED[key].endswith(f" {word}")}
    packages = () if key == "parallelizer.tp_plan" else ("shutil",)
    with pytest.raises(ConfigError) as error:
        check_config(composed, Trust(frozenset(words), packages))
    assert set(error.value.keys) == {k for k, option in NEEDED.items() if option == NEEDED[key]}


def test_what_executes_nothing_says_what_would_and_builds_without_it(composed: Composed) -> None:
    untrusted: list[Need] = []
    recipe = check_config(composed, NOTHING, untrusted)
    assert {need.key: need.option for need in untrusted} == NEEDED
    assert not recipe.model.trust_remote_code and recipe.model.attn_implementation == "packed"
    assert recipe.rollout.engine.command is None and recipe.parallelizer.tp_plan is None


def test_with_every_option_it_is_built_as_written(composed: Composed) -> None:
    recipe = check_config(composed, ALL)
    assert recipe.model.trust_remote_code and recipe.rollout.engine.command == ["sh", "-c", "touch pwned"]


def test_a_tokenizer_needs_it_too(composed: Composed) -> None:
    node = "{_target_: automodel_cli.models.tokenizer.PretrainedTokenizer, pretrained: a/b, trust_remote_code: true}"
    with pytest.raises(ConfigError) as error:
        check_config(compose("x.yaml", [f"model.tokenizer={node}"]), Trust(frozenset({COMMAND}), ("shutil",)))
    assert "model.tokenizer.trust_remote_code" in error.value.keys


def recall(folder: Path) -> Trust:
    return trust_store.load_trust(folder, (folder / "config.yaml").read_bytes())


def run_of(folder: Path, trust: Trust) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text("a: 1\n")
    remember(folder, trust, "a: 1\n")
    return folder


def test_a_run_remembers_for_its_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "me"))
    run = run_of(tmp_path / "run", ALL)
    assert recall(run) == ALL
    key = tmp_path / "me" / "automodel" / "trust.key"
    assert key.stat().st_mode & 0o777 == 0o600
    remember(run, NOTHING, "a: 1\n")
    assert recall(run) == NOTHING and not (run / FILE).exists()
    remember(run, ALL, "a: 1\n")
    key.chmod(0o644)
    assert not recall(run), "a key that others can read seals nothing"


def test_a_shared_run_folder_is_no_attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "attacker"))
    theirs = run_of(tmp_path / "theirs", ALL)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "me"))
    mine = run_of(tmp_path / "mine", Trust(frozenset({COMMAND})))
    assert not recall(theirs) and "another user" in recall(theirs).note
    sealed = json.loads((mine / FILE).read_text())
    for forged in (
        {**sealed, "trust": ["command", "remote-code"]},
        {**sealed, "packages": ["evil"]},
        {**sealed, "seal": "0" * 64},
        {"trust": ["command"]},
        [],
        {**sealed, "seal": 3},
    ):
        (mine / FILE).write_text(json.dumps(forged))
        assert not recall(mine) and recall(mine).note, forged
    (mine / FILE).write_text(json.dumps(sealed))
    assert recall(mine)
    (mine / "config.yaml").write_text("a: 2\n")
    assert not recall(mine) and "config.yaml was edited since" in recall(mine).note


def test_the_seal_is_compared_with_what_was_composed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, composed: Composed
) -> None:
    """Another user puts the sealed config back once a hostile one was composed."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "me"))
    run = tmp_path / "run"
    run.mkdir()
    hostile, sealed = HOSTILE.replace("pwned", "hostile"), composed.to_yaml()
    (run / "config.yaml").write_text(sealed)
    remember(run, ALL, sealed)
    assert trust_store.load_trust(run, compose(run / "config.yaml", run_dir=run).content) == ALL
    (run / "config.yaml").write_text(hostile)
    found = compose(run / "config.yaml", run_dir=run)
    (run / "config.yaml").write_text(sealed)
    assert "hostile" in str(found.tree["rollout"]["engine"]["command"])
    assert not trust_store.load_trust(run, found.content)
    assert found.path == run / "config.yaml" and run / "config.yaml" in found.files
    assert found.where("model.attn_implementation").file == "run/config.yaml"


@pytest.mark.parametrize("num_reads", range(1, 6))
def test_a_config_is_read_once(num_reads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is exchanged at any of the times that it is opened: what is composed and what is sealed are the same."""
    run, opened = tmp_path / "run", []
    run.mkdir()
    (run / "config.yaml").write_text("run_name: sealed\n")

    def exchange(event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and arguments[0] == str(run / "config.yaml") and not opened.count("done"):
            opened.append("open")
            if len(opened) == num_reads:
                opened.append("done")
                os.rename(run / "other.yaml", run / "config.yaml")

    (run / "other.yaml").write_text("run_name: other\n")
    sys.addaudithook(exchange)
    found = compose(run / "config.yaml", run_dir=run)
    opened.append("done")
    assert found.tree["run_name"] in found.content.decode()


def test_a_run_folder_brings_no_groups(tmp_path: Path, composed: Composed) -> None:
    """A file that somebody puts beside a sealed config is no option of a group."""
    run = tmp_path / "run"
    (run / "rollout").mkdir(parents=True)
    (run / "rollout" / "vllm.yaml").write_text("engine: {command: [touch, pwned]}\n")
    (run / "config.yaml").write_text(composed.to_yaml())
    found = compose(run / "config.yaml", ["rollout=vllm"], run_dir=run)
    assert "pwned]" not in str(found.tree["rollout"])
    assert [file for file in found.files if run in file.parents] == [run / "config.yaml"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("vllm serve m --port 8000", ["vllm", "serve", "m", "--port", "8000"]),
        ("a 'b c' \"d|e\" f=g", ["a", "b c", "d|e", "f=g"]),
        (["a", "$HOME; rm -rf /"], ["a", "$HOME; rm -rf /"]),
        ("a '*' h?llo", ["a", "*", "h?llo"]),
    ],
)
def test_a_command_is_words(command: str | list[str], words: list[str]) -> None:
    assert program_arguments(command) == words


@pytest.mark.parametrize(
    "command", ["a; b", "a && b", "a | b", "a > b", "a &", "a $HOME", "a `b`", "a $(b)", "A=1 b", "a 'b", "", []]
)
def test_a_command_for_a_shell_is_refused(command: str | list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        program_arguments(command)
    if error.value.fix and "bash" in error.value.fix:
        fixed = json.loads(error.value.fix.partition("=")[2].strip("'"))
        assert program_arguments(fixed) == ["bash", "-c", command]


@pytest.mark.parametrize("name", ["../up", "a/b", "/etc", ".", "..", "", "a\nb", "-rf", ".hidden", "a\x00", "a" * 201])
def test_a_run_name_is_one_component(name: str) -> None:
    with raises(ConfigError, "invalid_value", keys=("run_name",)) as error:
        check_run_name(name)
    check_run_name((error.value.fix or "").partition("=")[2])


def test_good_run_names() -> None:
    for name in (None, "a", "qwen3-0.6b_sft", "run [2]", "été"):
        check_run_name(name)


def test_what_others_may_see_holds_nothing_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MY_SECRET", "hunter2")
    Path("x.yaml").write_text(
        HOSTILE
        + "run_name: ${oc.env:MY_SECRET}\noutput_dir: runs/${run_name}/${oc.env:MY_SECRET,x}\n"
        + "checkpoint: {resume: '${output_dir}'}\n"
        + "logging: {trackers: [{_target_: automodel_cli.training.trackers.MLflow, tracking_uri: '${run_name}'}]}\n"
    )
    composed = compose("x.yaml", ["objective=dapo", "data.path=${oc.env:MY_SECRET}/a", "seed=${oc.decode:'7'}"])
    assert composed.tree["output_dir"] == "runs/hunter2/hunter2" and composed.tree["data"]["path"] == "hunter2/a"
    assert "hunter2" not in json.dumps(composed.public()) + composed.to_yaml()
    assert composed.shown("logging.trackers.0.tracking_uri") == "${run_name}"
