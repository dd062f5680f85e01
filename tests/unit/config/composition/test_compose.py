"""Composition: search path, overrides, origins, spellings, interpolations."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from automodel_cli.config.composition import bundled_recipes
from automodel_cli.config.composition.bundled_recipes import locate
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.composition.hydra_adapter import Loader
from automodel_cli.config.errors import ConfigError
from automodel_cli.training.train_config import TrainConfig
from tests.errors import assert_error, raises


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


BASE = """\
seed: 1
mesh: {dp_size: 2, tp_size: 1}
model:
  config:
    layers: [1, 2, {a: b}]
optimizer:
  lr: 1e-5
scheduler: null
"""


def test_values_and_origins_follow_the_merge_order(here: Path) -> None:
    write(here / "base.yaml", BASE)
    write(here / "exp/run one.yaml", "defaults:\n  - /base\n  - _self_\nmesh:\n  dp_size: 4\n")
    write(here / "exp/base.yaml", BASE)
    composed = compose("exp/run one.yaml", ["optimizer.lr=2e-5", "model.config.layers.0=7", "scheduler.warmup=3"])
    assert composed.name == "run one" and composed.path == here / "exp/run one.yaml"
    assert composed.tree["mesh"] == {"dp_size": 4, "tp_size": 1}
    assert composed.tree["optimizer"]["lr"] == 2e-5
    assert composed.tree["model"]["config"]["layers"] == [7, 2, {"a": "b"}]
    assert composed.tree["scheduler"] == {"warmup": 3}
    assert composed.origin("mesh.dp_size") == "exp/run one.yaml:5"
    assert composed.origin("mesh.tp_size") == "exp/base.yaml:2"
    assert composed.origin("optimizer.lr") == "command line"
    assert composed.origin("nobody.set.this") == "default"


def test_a_file_composes_with_the_bundled_groups(here: Path) -> None:
    group = next(p for p in sorted(bundled_recipes.conf_dir().iterdir()) if p.is_dir() and list(p.glob("*.yaml")))
    option = sorted(group.glob("*.yaml"))[0]
    write(here / "mine.yaml", f"defaults:\n  - {group.name}: {option.stem}\n  - _self_\n")
    composed = compose("mine.yaml")
    assert option in composed.files
    first = next(iter(composed.tree[group.name]))
    assert composed.origin(f"{group.name}.{first}").startswith(f"conf/{group.name}/{option.name}:")


def test_the_users_folder_comes_before_the_bundled_one(here: Path) -> None:
    name = bundled_recipes.recipe_names()[0]
    write(here / f"{name}.yaml", "mine: 1\n")
    write(here / "run.yaml", f"defaults: [{name}, _self_]\n")
    assert compose("run.yaml").tree == {"mine": 1}


def test_to_yaml_keeps_interpolations_and_reads_back_the_same(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hunter2")
    text = BASE + "token: ${oc.env:SECRET}\nname: run-${seed}\ntemplate: |\n  a # b\n  c: d\nquoted: '007'\nempty: {}\n"
    write(here / "x.yaml", text)
    composed = compose("x.yaml", ["mesh.dp_size=8"])
    assert composed.tree["token"] == "hunter2" and composed.tree["name"] == "run-1"
    written = composed.to_yaml()
    assert "hunter2" not in written and "token: ${oc.env:SECRET}" in written
    assert "  dp_size: 8  # command line\n" in written
    assert "  lr: 1.0e-05  # x.yaml:7\n" in written
    again = write(here / "again.yaml", written)
    assert OmegaConf.load(again) == composed._config
    assert compose(again).tree == composed.tree


@pytest.mark.parametrize(
    ("spelling", "meaning", "fix"),
    [
        ("yes", "boolean", "flag=true"),
        ("Off", "boolean", "flag=false"),
        ("0123", 83, "flag=123"),
        ("0x1F", 31, "flag=31"),
        ("12:30", 60, 'flag="12:30"'),
    ],
)
def test_spellings_with_two_meanings_are_refused(here: Path, spelling: str, meaning: object, fix: str) -> None:
    write(here / "x.yaml", f"a: 1\nflag: {spelling}\n")
    composed = compose("x.yaml")
    error = composed.error(composed.problems)
    assert_error(error, "ambiguous", "flag", values=(spelling, meaning), fix=fix)
    assert error.origin == "flag (x.yaml:2)"
    assert not compose("x.yaml", ["flag=true"]).problems, "an override replaces the spelling"
    write(here / "y.yaml", f"flag: '{spelling}'\n")
    assert not compose("y.yaml").problems, "quotes make it text"


def test_numbers_keep_their_type_in_files_and_overrides(here: Path) -> None:
    write(here / "x.yaml", "lr: 1e-5\nsteps: 1_000\n")
    tree = compose("x.yaml", ["other=1e-5"]).tree
    assert tree == {"lr": 1e-5, "steps": 1000, "other": 1e-5}


@pytest.mark.parametrize(
    ("text", "value", "line"),
    [
        ("a: 1\nb: [1, 2\n", "'<stream end>'", 3),
        ("a: 1\nb: 2\na: 3\n", "duplicate key a", 3),
        ("- 1\n", "mapping", 1),
    ],
)
def test_broken_yaml_is_named_with_its_line(here: Path, text: str, value: str, line: int) -> None:
    write(here / "x.yaml", text)
    with raises(ConfigError, "invalid_yaml", values=("x.yaml", value)) as error:
        compose("x.yaml")
    assert error.value.origin == f"x.yaml:{line}"


def test_broken_yaml_in_an_included_file(here: Path) -> None:
    write(here / "base.yaml", "a: 1\na: 2\n")
    write(here / "x.yaml", "defaults: [base, _self_]\n")
    with raises(ConfigError, "invalid_yaml", values=("duplicate key a",)) as error:
        compose("x.yaml")
    assert str(error.value.origin) == "base.yaml:2"


@pytest.mark.parametrize(
    ("override", "key", "values", "fix"),
    [
        ("lr", "lr", ("key=value",), "lr=VALUE"),
        ("--lr=1", "--lr", (), "lr=1"),
        ("lr=1,2", "lr", (2, "automodel sweep -c CONF lr=1,2"), "lr=1"),
        ("p=a(b", "p", (), "'p=\"a(b\"'"),
        ("~zzz", "zzz", (), None),
        ("model.config.layers.9=1", "model.config.layers.9", ("model.config.layers", 0, 2), None),
    ],
)
def test_override_errors(here: Path, override: str, key: str, values: tuple[object, ...], fix: str | None) -> None:
    write(here / "x.yaml", BASE)
    with raises(ConfigError, "invalid_override", keys=(key,), values=values, fix=fix) as error:
        compose("x.yaml", [override])
    assert error.value.origin == f"{override} (command line)"
    assert fix is not None or error.value.fix is None


def test_a_section_is_removed_with_what_the_recipe_itself_says_in_it(here: Path) -> None:
    write(here / "rewards/exact.yaml", "exact: {a: 1}")
    write(here / "base.yaml", "defaults: [rewards: exact, _self_]\n")
    write(here / "x.yaml", "defaults: [base, _self_]\nrewards: {mine: {a: 2}}\n")
    assert compose("x.yaml").tree["rewards"] == {"exact": {"a": 1}, "mine": {"a": 2}}
    assert "rewards" not in compose("x.yaml", ["~rewards"]).tree
    assert "rewards" not in compose("base.yaml", ["~rewards"]).tree
    for overrides in (["~rewards", "rewards.new={a: 3}"], ["rewards.new={a: 3}", "~rewards"]):
        assert compose("x.yaml", overrides).tree["rewards"] == {"new": {"a": 3}}
    with raises(ConfigError, "mutually_exclusive", keys=("rewards",), values=("~rewards", "rewards=exact")):
        compose("x.yaml", ["rewards=exact", "~rewards"])


def test_the_printed_quoting_works_when_pasted(here: Path) -> None:
    import shlex

    write(here / "x.yaml", BASE)
    with pytest.raises(ConfigError) as error:
        compose("x.yaml", ["layout=Et*3|(tt|)*29,m|L"])
    (fixed,) = shlex.split(error.value.fix or "")
    assert compose("x.yaml", [fixed]).tree["layout"] == "Et*3|(tt|)*29,m|L"


def test_a_file_named_like_the_base_it_starts_from(here: Path) -> None:
    """Its own name in the defaults of a file is the bundled file, for whoever includes it too."""
    write(here / "sft.yaml", "defaults: [sft, _self_]\nseed: 7\n")
    write(here / "other.yaml", "defaults: [sft, _self_]\nrun_name: x\n")
    (here / "optimizer").mkdir()
    write(here / "optimizer" / "adamw.yaml", "defaults: [adamw, _self_]\nlr: 0.5\n")
    for conf in ("sft.yaml", "other.yaml"):
        composed = compose(conf)
        assert composed.tree["_target_"] == "automodel_cli.recipes.sft.SFTRecipe"
        assert (composed.tree["seed"], composed.origin("seed")) == (7, "sft.yaml:2")
        assert composed.tree["optimizer"]["_target_"] == "automodel_cli.training.optimizers.nodes.AdamW"
        assert composed.tree["optimizer"]["lr"] == 0.5
        shown = [bundled_recipes.display(file) for file in composed.files]
        assert [name for name in shown if name.endswith("adamw.yaml")] == [
            "conf/optimizer/adamw.yaml",
            "optimizer/adamw.yaml",
        ]
        assert shown.index("conf/sft.yaml") < shown.index("sft.yaml")
    assert compose("sft.yaml", ["optimizer=muon"]).tree["optimizer"]["_target_"].endswith("Muon")


@pytest.mark.parametrize("conf", ["sft.yaml", "other.yaml"])
def test_a_bundled_recipe_is_based_on_bundled_recipes_only(here: Path, conf: str) -> None:
    """A recipe of the user that has the name of a base of its base replaces nothing."""
    write(here / "sft.yaml", "defaults: [vlm, _self_]\nseed: 7\n")
    write(here / "other.yaml", "defaults: [vlm, _self_]\n")
    composed = compose(conf)
    assert [file.name for file in composed.files if bundled_recipes.conf_dir() not in file.parents] == [conf]
    assert composed.tree["_target_"] == "automodel_cli.recipes.vlm.VLMRecipe"
    assert composed.tree["seed"] == (7 if conf == "sft.yaml" else 0)


@pytest.mark.parametrize("files", [{"a": "a"}, {"a": "b", "b": "a"}], ids=["itself", "each other"])
def test_defaults_that_lead_back_are_refused(here: Path, files: dict[str, str]) -> None:
    for name, base in files.items():
        write(here / f"{name}.yaml", f"defaults: [{base}, _self_]\n")
    with raises(ConfigError, "invalid_yaml", keys=("defaults",)) as error:
        compose("a.yaml")
    assert error.value.origin == "defaults of a.yaml"


def test_groups_on_the_command_line(here: Path) -> None:
    write(here / "opt/adam.yaml", "lr: 1\n")
    write(here / "opt/sgd.yaml", "lr: 2\nmomentum: 0\n")
    write(here / "corpus/train.jsonl", "{}")
    write(here / "x.yaml", "defaults:\n  - opt: adam\n  - _self_\n")
    write(here / "bare.yaml", "a: 1\n")
    assert compose("x.yaml", ["opt=sgd", "opt.momentum=0.9"]).tree == {"opt": {"lr": 2, "momentum": 0.9}}
    assert compose("bare.yaml", ["opt=sgd"]).tree["opt"] == {"lr": 2, "momentum": 0}, "no + needed"
    assert compose("x.yaml", ["opt=null"]).tree == {"opt": None}
    assert compose("bare.yaml", ["corpus=some/path"]).tree["corpus"] == "some/path", "a folder of data is no group"
    with raises(ConfigError, "invalid_choice", keys=("opt",), values=("adma", "adam", "sgd"), fix="opt=adam") as error:
        compose("x.yaml", ["opt=adma"])
    assert error.value.origin == "opt=adma (command line)"


def test_dr_grpo_is_both_its_halves(here: Path) -> None:
    """arXiv:2503.20783 takes the length out of the loss and the deviation out of the advantages."""
    write(here / "mine.yaml", "defaults: [grpo, {override objective: dr_grpo}, _self_]\n")
    tree = compose("mine.yaml").tree
    assert tree["objective"]["loss_aggregation"] == "constant" and tree["rollout"]["normalize_advantages"] is False
    assert compose("mine.yaml", ["rollout.normalize_advantages=true"]).tree["rollout"]["normalize_advantages"] is True
    assert "normalize_advantages" not in compose("mine.yaml", ["objective=grpo"]).tree["rollout"]


def test_interpolations_that_fail_are_problems_not_tracebacks(here: Path) -> None:
    write(here / "x.yaml", "a: ${nope.b}\nt: ${now:%Y}\ne: ${oc.env:SURELY_UNSET_1}\n")
    composed = compose("x.yaml")
    error = composed.error(composed.problems)
    for key, value in (("a", "Interpolation key 'nope.b' not found"), ("t", "${now:%Y}"), ("e", "'SURELY_UNSET_1'")):
        assert_error(error, "invalid_interpolation", key, values=(value,))


def test_which_file(here: Path) -> None:
    write(here / "mine.yaml", "a: 1\n")
    write(here / "old.yml", "a: 1\n")
    name = bundled_recipes.recipe_names()[0]
    assert locate("mine.yaml") == here / "mine.yaml"
    assert locate(name) == locate(f"conf/{name}.yaml") == bundled_recipes.recipe_path(name), "as messages call it"
    cases = {
        "old.yml": "mv old.yml old.yaml",
        "mime.yaml": "-c mine.yaml",
        "mine": "-c mine.yaml",
        name[:-1]: f"-c {name}",
        f"somewhere/{name}.yaml": f"-c {name}   (bundled)",
    }
    for given, fix in cases.items():
        with pytest.raises(ConfigError) as error:
            locate(given)
        assert error.value.fix == fix and error.value.keys == ("--conf",), given
        assert error.value.code in ("unsupported_file_type", "missing_file", "unknown_name")


def test_the_hydra_adapter_lists_files_in_merge_order(here: Path) -> None:
    """The one test of Hydra's semi-private names: if it fails after an upgrade, only hydra_adapter.py needs work."""
    write(here / "base.yaml", "a: 1\n")
    write(here / "g/o.yaml", "# @package _global_\nb: 2\n")
    write(here / "g/p.yaml", "c: 3\n")
    write(here / "x.yaml", "defaults:\n  - base\n  - g: o\n  - g@h: p\n  - _self_\nd: 4\n")
    merged = Loader([here]).merge("x", [])
    assert [(p.relative_to(here).as_posix(), k) for p, k in merged.files] == [
        ("base.yaml", ""),
        ("g/o.yaml", ""),
        ("g/p.yaml", "h"),
        ("x.yaml", ""),
    ]
    assert OmegaConf.to_container(merged.config) == {"a": 1, "b": 2, "h": {"c": 3}, "d": 4}


LIMITS = "train: {max_steps: %s, epochs: %s}\n"


@pytest.mark.parametrize(
    ("base", "own", "overrides", "expected"),
    [
        (("null", "1"), "max_steps: 7", [], (7, None)),
        (("7", "null"), "epochs: 2", [], (None, 2)),
        (("7", "null"), "epochs: 2", ["train.max_steps=9"], (9, None)),
        (("null", "1"), "max_steps: 7, epochs: 3", [], (7, 3)),
        (("null", "1"), "max_steps: 7", ["train.max_steps=5", "train.epochs=2"], (5, 2)),
        (("null", "1"), "max_steps: null", [], (None, 1)),
        (("null", "1"), "max_steps: 7", ["train.max_steps=null", "train.epochs=2"], (None, 2)),
        (("null", "1"), "max_steps: 7", ["train={max_steps: 4}"], (4, None)),
    ],
)
def test_a_limit_that_is_given_later_replaces_the_other(here: Path, base, own, overrides, expected) -> None:
    write(here / "base.yaml", LIMITS % base)
    write(here / "mine.yaml", f"defaults: [base, _self_]\ntrain: {{{own}}}\n")
    composed = compose("mine.yaml", overrides)
    assert (composed.tree["train"]["max_steps"], composed.tree["train"]["epochs"]) == expected
    write(here / "again.yaml", composed.to_yaml())  # as a run's folder keeps it
    assert compose("again.yaml").tree["train"] == composed.tree["train"]


def test_a_replaced_limit_names_what_replaced_it(here: Path) -> None:
    composed = compose("sft", ["train.max_steps=5"])
    assert "train.max_steps" in composed.origin("train.epochs") and "command line" in composed.origin("train.epochs")


@pytest.mark.parametrize("name", bundled_recipes.recipe_names())
def test_the_line_that_a_finished_run_prints_replaces_the_limit_of_every_recipe(here: Path, name: str) -> None:
    write(here / "run/config.yaml", compose(name).to_yaml())
    limits = compose("run/config.yaml", ["train.max_steps=4400"], run_dir=here / "run").tree["train"]
    assert TrainConfig(1, max_steps=limits["max_steps"], epochs=limits.get("epochs")).num_steps(10) == 4400


DOLLY = {"instruction": "instruction", "input": "context", "output": "response"}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], {"path": "databricks/databricks-dolly-15k", "column_mapping": DOLLY}),
        (["data.path=rows.jsonl"], {"path": "rows.jsonl"}),
        (
            ["data.path=databricks/databricks-dolly-15k"],
            {"path": "databricks/databricks-dolly-15k", "column_mapping": DOLLY},
        ),
        (
            ["data.path=rows.jsonl", "data.column_mapping.text=said"],
            {"path": "rows.jsonl", "column_mapping": {"text": "said"}},
        ),
        (["data.column_mapping={}"], {"path": "databricks/databricks-dolly-15k", "column_mapping": {}}),
        (
            ["data.column_mapping={text: said}"],
            {"path": "databricks/databricks-dolly-15k", "column_mapping": {"text": "said"}},
        ),
        (["data.datasets=[{path: rows.jsonl}]"], {"datasets": [{"path": "rows.jsonl"}]}),
    ],
)
def test_a_path_of_ones_own_takes_the_columns_of_the_groups_dataset_with_it(
    here: Path, overrides: list[str], expected: dict[str, object]
) -> None:
    held_out = {"validation_size": 0.02}
    write(here / "mine.yaml", "defaults: [sft, data: dolly, _self_]\ndata: {seq_len: 9}\n")
    found = compose("mine.yaml", overrides).tree["data"]
    described = {key: value for key, value in found.items() if key not in ("seq_len", "packing", "loss_mask")}
    assert described == held_out | expected


def test_a_path_in_the_users_file_does_so_too_and_keeps_what_that_file_says(here: Path) -> None:
    dataset = "data: {path: a.jsonl, column_mapping: {system: s}}\n"
    write(here / "mine.yaml", f"defaults: [grpo, data: gsm8k, _self_]\n{dataset}")
    found = compose("mine.yaml").tree["data"]
    assert found["column_mapping"] == {"system": "s"} and not {"name", "validation_split"} & set(found)
    # what the user's own file says of its dataset stays under another path: another part of the same data
    assert compose("mine.yaml", ["data.path=b.jsonl"]).tree["data"]["column_mapping"] == {"system": "s"}


def test_a_task_of_a_recipe_makes_room_for_rows(here: Path) -> None:
    assert "generator" not in compose("quickstart", ["data.path=rows.jsonl"]).tree["data"]
    assert compose("quickstart", ["data.generator.num_train=3"]).tree["data"]["generator"]["num_train"] == 3
