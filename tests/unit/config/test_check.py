"""The strict check: exact texts, all errors at once, suggestions, conversions, construction."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import pytest

from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.keys.foreign import FOREIGN
from automodel_cli.config.security.trust import Trust
from tests.errors import assert_error, raises

GOOD = """\
_target_: toy_recipe.nodes.Recipe
data: {path: train.jsonl}
optimizer: {_target_: toy_recipe.nodes.Optimizer}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1]), *sys.path])
    return tmp_path


def build(text: str = GOOD, *overrides: str) -> Any:
    Path("x.yaml").write_text(text)
    return check_config(compose("x.yaml", overrides), Trust(packages=("toy_recipe",)))


def refusal(text: str = GOOD, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        build(text, *overrides)
    return error.value


def test_a_good_config_becomes_objects() -> None:
    recipe = build(GOOD, "train.betas=[1,0.5]", "model.adapter={rank: 2, alpha: 4}", "model.config={model_type: llama}")
    from toy_recipe import nodes

    assert isinstance(recipe, nodes.Recipe) and recipe.optimizer == nodes.Optimizer()
    assert recipe.train.betas == (1.0, 0.5) and all(type(b) is float for b in recipe.train.betas)
    assert recipe.model.adapter == nodes.Adapter(2, 4.0) and type(recipe.model.adapter.alpha) is float
    assert recipe.model.config == {"model_type": "llama"}
    assert recipe.mesh == nodes.Mesh() and recipe.run_name is None


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("override", "code", "values", "fix"),
    [
        ("train.max_steps=lots", "wrong_type", ("whole", "'lots'"), None),
        ("train.max_steps=1e3", "wrong_type", ("whole", 1000.0), "train.max_steps=1000"),
        ("train.max_steps=true", "wrong_type", ("whole", "true"), None),
        ("train.max_steps=null", "wrong_type", ("whole", "null"), None),
        ("optimizer.lr='1e-5'", "wrong_type", ("number", "'1e-5'"), "optimizer.lr=1e-5"),
        ("train.deterministic=yes", "wrong_type", ("true", "false", "'yes'"), "train.deterministic=true"),
        ("data.path=7", "wrong_type", ("text", 7), "data.path='\"7\"'"),
        ("run_name=7", "wrong_type", ("text", "null", 7), "run_name='\"7\"'"),
        ("data.packing=bdf", "invalid_choice", ("best_fit", "none", "wrapped", "'bdf'"), "data.packing=best_fit"),
        ("data.weights=0.5", "wrong_type", ("list", "null", 0.5), "data.weights=[0.5]"),
        ("data.weights=[0.5,x]", "wrong_type", ("data.weights.1", "'x'"), None),
        ("train.betas=[0.9]", "wrong_type", (2, "[0.9]"), None),
        ("data.column_mapping={a: 1}", "wrong_type", ("data.column_mapping.a", 1), "data.column_mapping.a='\"1\"'"),
        ("mesh=4", "wrong_type", ("Mesh", 4), None),
        ("train.max_stepz=3", "unknown_key", (), "train.max_steps=3"),
        ("trian.max_steps=3", "unknown_key", ("trian",), "train.max_steps=3"),
        ("model.adaptor.rank=4", "unknown_key", ("model.adaptor",), "model.adapter.rank=4"),
        ("modle.adapter.rank=4", "unknown_key", ("modle",), "model.adapter.rank=4"),
        ("model.adaptor={rank: 4, alpha: 2}", "unknown_key", (), "model.adapter.rank=4 model.adapter.alpha=2"),
        ("model.adaptor=null", "unknown_key", (), "model.adapter=null"),
        ("model.adaptor={}", "unknown_key", (), "model.adapter={}"),
        ("dta.column_mapping.a=b", "unknown_key", (), "data.column_mapping.a=b"),
        ("train.lr=3", "unknown_key", (), "optimizer.lr=3"),
        ("micro_batch_size=2", "unknown_key", (), "train.microbatch_size=2"),
        ("cutoff_len=256", "unknown_key", (), "data.seq_len=256"),
        ("sample_packing=true", "unknown_key", (), "data.packing=best_fit"),
        ("learning_rate=1e-3", "unknown_key", (), "optimizer.lr=0.001"),
        ("gradient_accumulation_steps=4", "unknown_key", ("train.global_batch_size",), None),
        ("mesh.dp_sise=3", "unknown_key", (), "mesh.dp_size=3"),
        ("+qqq=3", "unknown_key", ("qqq",), None),
        ("mesh._args_=[1]", "unknown_key", ("_target_", "_partial_"), None),
        ("mesh.dp_size=0", "invalid_config", ("mesh.dp_size", 1), "mesh.dp_size=1"),
        ("data.path=???", "missing_key", ("text",), "data.path=..."),
        ("parallelizer={reshard: true}", "missing_key", ("toy_recipe.nodes.Fsdp", "toy_recipe.nodes.Ddp"), None),
        ("parallelizer._target_=toy_recipe.nodes.Adapter", "invalid_target", ("Fsdp", "Ddp", "Adapter"), None),
        (
            "parallelizer._target_=toy_recipe.nodes.Fsbp",
            "invalid_target",
            ("toy_recipe.nodes.Fsbp",),
            "parallelizer._target_=toy_recipe.nodes.Fsdp",
        ),
    ],
)
def test_one_error_names_key_value_and_fix(
    override: str, code: str, values: tuple[object, ...], fix: str | None
) -> None:
    error = refusal(GOOD, override)
    assert_error(error, code, values=values, fix=fix)
    (key,) = error.keys
    assert override.lstrip("+").partition("=")[0].startswith(key.split(".")[0]) and key in str(error)
    assert fix is not None or error.fix is None
    assert "command line" in (error.origin or "")
    assert error.exit_code == 2


@pytest.mark.parametrize(
    "override",
    [
        "train.max_steps=1e3",
        "optimizer.lr='1e-5'",
        "data.path=7",
        "data.packing=bdf",
        "data.weights=0.5",
        "mesh.dp_size=0",
    ],
)
def test_a_fix_works_when_pasted(override: str) -> None:
    import shlex

    (fixed,) = shlex.split(refusal(GOOD, override).fix or "")
    build(GOOD, fixed)


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("pipeline.layers_per_stage=0", "pipeline.layers_per_stage=null"),
        ("pipeline.microbatch_group_size=0", "pipeline.microbatch_group_size=null"),
    ],
)
def test_a_node_below_a_section_gives_its_fix_with_the_whole_key(override: str, fix: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(compose("quickstart", ["mesh.pp_size=2", "pipeline=1f1b", override]))
    assert error.value.fix == fix


def test_all_errors_at_once_by_file_and_line() -> None:
    Path("base.yaml").write_text(GOOD + "train:\n  max_steps: lots\n")
    text = "defaults: [base, _self_]\nmesh:\n  dp_size: 0\n  ep: 4\nseed: yes\n"
    error = refusal(text, "data.packing=bdf")
    assert str(error) == (
        "5 errors in x.yaml, nothing was started\n"
        "  x.yaml:4      [unknown_key] unknown key mesh.ep\n"
        "                fix  automodel options mesh\n"
        "  x.yaml:5      [ambiguous] seed: yes is ambiguous: a boolean in a file, text on the command line\n"
        "                fix  seed=true\n"
        "  x.yaml:5      [unknown_key] unknown key seed\n"
        "  base.yaml:5   [wrong_type] train.max_steps expects a whole number, got 'lots'\n"
        "  command line  [invalid_choice] data.packing expects best_fit, none or wrapped, got 'bdf'\n"
        "                fix  data.packing=best_fit"
    ), "the one test of the exact form of a list"
    assert error.code == "several_errors" and error.problems[0] == ("unknown_key", "mesh.ep")


def test_a_rule_between_fields_names_every_value_and_origin() -> None:
    error = refusal(GOOD + "train: {global_batch_size: 9}\n", "mesh.dp_size=2")
    assert str(error) == (
        "train.global_batch_size=9 does not divide over 2 ranks\n"
        "  from  train.global_batch_size=9 (x.yaml:4); mesh.dp_size=2 (command line); mesh.tp_size=1 (default)\n"
        "  fix   train.global_batch_size=2"
    )


def test_a_rule_of_a_section_that_the_recipe_asks_for() -> None:
    expected = "3 steps are too few\n  from  train.max_steps=3 (default)\n  fix   train.max_steps=4"
    assert str(refusal(GOOD, "mesh.tp_size=4")) == expected


def test_missing_required_keys() -> None:
    error = refusal("_target_: toy_recipe.nodes.Recipe\ndata:\n  seq_len: 3\n")
    assert error.problems == (("missing_key", "optimizer"), ("missing_key", "data.path"))
    assert_error(error, "missing_key", "optimizer", fix="try  optimizer=...")
    assert_error(error, "missing_key", "data.path", fix="try  data.path=...")


def test_no_recipe() -> None:
    assert_error(refusal("a: 1\n"), "no_recipe", values=("_target_",))


def test_foreign_names_below_a_foreign_section() -> None:
    error = refusal(GOOD + "trainer:\n  micro_batch_size: 2\n  max_grad_norm: 3\n  tensor_parallel_degree: 2\n")
    assert "fix  train.microbatch_size=2" in str(error) and "fix  mesh.tp_size=2" in str(error)


def test_the_foreign_table_stays_small() -> None:
    assert 60 <= len(FOREIGN) <= 100
    assert len({name.lower() for name in FOREIGN}) == len(FOREIGN)


def test_the_foreign_table_names_keys_that_exist() -> None:
    from automodel_cli.config import schema
    from automodel_cli.config.security.targets import resolve

    known = set(schema.keys(resolve("automodel_cli.recipes.sft.SFTRecipe")))
    known |= set(schema.keys(resolve("automodel_cli.recipes.grpo.GRPORecipe")))
    known |= set(schema.keys(resolve("automodel_cli.training.optimizers.nodes.AdamW"), "optimizer."))
    known |= set(schema.keys(resolve("automodel_cli.training.optimizers.lr_scheduler.Cosine"), "lr_scheduler."))
    known |= set(schema.keys(resolve("automodel_cli.distributed.config.FSDP2Config"), "parallelizer."))
    assert [row for row in FOREIGN.values() if row.key not in known] == []


def test_names_of_sampling_that_others_have() -> None:
    from automodel_cli.config import schema
    from automodel_cli.config.keys.suggestions import suggest
    from automodel_cli.config.security.targets import resolve

    known = set(schema.keys(resolve("automodel_cli.recipes.grpo.GRPORecipe")))
    of_ours = suggest("rollout.num_generations", 8, known)
    assert of_ours is not None and of_ours.fix == "rollout.group_size=8"
    for key, said in (
        ("rollout.stop", "a response ends at a stop token"),
        ("rollout.stop_strings", "a response ends at a stop token"),
        ("rollout.stop_token_ids", "a response ends at a stop token"),
        ("rollout.min_p", "rollouts are drawn by"),
        ("rollout.repetition_penalty", "rollouts are drawn by"),
    ):
        found = suggest(key, "0.5", known)
        assert found is not None and found.fix is None and said in found.note, key
    same_leaf = suggest("max_grad_norm", 3, known)
    assert same_leaf is not None and same_leaf.fix == "train.max_grad_norm=3"


def test_a_key_that_is_spelt_alike_and_means_something_else_is_no_typo() -> None:
    from automodel_cli.config.keys.suggestions import suggest

    known = ["objective.kl_coef", "objective.clip_high"]
    assert suggest("objective.value_coef", 0.5, known) is None
    for typo, meant in (("objective.kl_cof", known[0]), ("objective.clip_hihg", known[1]), ("kl_coeff", known[0])):
        found = suggest(typo, 0.5, known)
        assert found is not None and found.fix == f"{meant}=0.5"


AXOLOTL = """\
base_model: Qwen/Qwen3-0.6B
datasets:
  - {path: train.jsonl, type: chat_template}
val_set_size: 0.05
sequence_len: 4096
sample_packing: true
adapter: lora
lora_r: 16
lora_target_linear: true
micro_batch_size: 2
optimizer: adamw_torch
"""
LLAMA_FACTORY = """\
model_name_or_path: org/name
stage: sft
do_train: true
finetuning_type: lora
lora_target: q_proj,v_proj
dataset: alpaca
template: llama3
cutoff_len: 2048
lr_scheduler_type: cosine
"""
TRL = """\
model_name_or_path: org/name
dataset_name: org/rows
learning_rate: 2.0e-4
num_train_epochs: 3
packing: true
gradient_checkpointing: true
per_device_train_batch_size: 2
use_peft: true
"""


@pytest.mark.parametrize(
    ("tool", "text", "translated"),
    [
        (
            "axolotl",
            AXOLOTL,
            (
                "model.pretrained=Qwen/Qwen3-0.6B data.validation_size=0.05 data.seq_len=4096 data.packing=best_fit "
                "model.lora.rank=16 model.lora.target_modules=all-linear train.microbatch_size=2"
            ),
        ),
        (
            "LLaMA-Factory",
            LLAMA_FACTORY,
            (
                "model.pretrained=org/name 'model.lora.target_modules=[q_proj,v_proj]' data.seq_len=2048 "
                "lr_scheduler=cosine"
            ),
        ),
        (
            "TRL",
            TRL,
            (
                "model.pretrained=org/name data.path=org/rows optimizer.lr=0.0002 train.epochs=3 data.packing=best_fit "
                "parallelizer.activation_checkpointing=full train.microbatch_size=2"
            ),
        ),
    ],
)
def test_another_tools_config_is_called_by_its_name(tool: str, text: str, translated: str) -> None:
    import shlex

    Path("x.yaml").write_text(text)
    with raises(ConfigError, "no_recipe", values=(tool,)) as error:
        check_config(compose("x.yaml"))
    command, _, _ = (error.value.fix or "").partition("   (")
    assert translated in command
    words = shlex.split(command)
    assert words[:4] == ["automodel", "check", "-c", "sft"]
    check_config(compose("sft", [*words[4:], "model.pretrained=org/name", "data.path=train.jsonl"]))


def test_another_tools_keys_on_our_base_are_named_first_and_translated() -> None:
    Path("x.yaml").write_text("defaults: [sft, _self_]\n" + AXOLOTL.replace("optimizer: adamw_torch\n", ""))
    with pytest.raises(ConfigError) as error:
        check_config(compose("x.yaml"))
    first, text = str(error.value).splitlines()[1], str(error.value)
    assert "[no_recipe]" in first and "axolotl" in first and "fix  model.pretrained=Qwen/Qwen3-0.6B" in text


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("val_set_size=0.1", "data.validation_size=0.1"),
        ("lora_target=all", "model.lora.target_modules=all-linear"),
        ("lora_target=[q_proj,v_proj]", "'model.lora.target_modules=[q_proj,v_proj]'"),
        ("optim=adamw_8bit", "optimizer=adamw8bit"),
        ("packing=true", "data.packing=best_fit"),
        ("train_on_inputs=false", "data.loss_mask=assistant"),
        ("learning_rate=1e-4", "optimizer.lr=0.0001"),
    ],
)
def test_a_foreign_value_becomes_one_of_ours(override: str, fix: str) -> None:
    filled = ["model.pretrained=org/name", "data.path=train.jsonl"]
    with pytest.raises(ConfigError) as error:
        check_config(compose("sft", [*filled, override]))
    assert error.value.fix == fix


@pytest.mark.parametrize("annotation", ["", " -> int"])
def test_a_section_made_by_a_function_says_what_it_makes(here: Path, annotation: str) -> None:
    (here / "own_nodes.py").write_text(f"def make(){annotation}:\n    raise SystemExit('must not run')\n")
    Path("x.yaml").write_text(GOOD + "model: {_target_: own_nodes.make}\nmesh: {_target_: own_nodes.make}\n")
    with pytest.raises(ConfigError) as error:
        check_config(compose("x.yaml"), Trust(packages=("toy_recipe", "own_nodes")))
    text = str(error.value)
    assert "save_pretrained(FOLDER) and set model.pretrained=FOLDER" in text
    assert ("which returns int" if annotation else "no return annotation") in text and "[invalid_target]" in text
    (here / "own_nodes.py").write_text(
        "from toy_recipe import nodes\ndef make() -> nodes.Mesh:\n    return nodes.Mesh(tp_size=2)\n"
    )
    Path("x.yaml").write_text(GOOD + "mesh: {_target_: own_nodes.make}\n")
    sys.modules.pop("own_nodes")
    assert check_config(compose("x.yaml"), Trust(packages=("toy_recipe", "own_nodes"))).mesh.tp_size == 2
    sys.modules.pop("own_nodes")


def test_third_party_signatures_dtypes_and_partial() -> None:
    text = GOOD + (
        "parallelizer:\n"
        "  _target_: toy_recipe.nodes.Fsdp\n"
        "  mp_policy: {_target_: torch.distributed.fsdp.MixedPrecisionPolicy, param_dtype: bfloat16}\n"
    )
    optimizer = ["optimizer._target_=torch.optim.AdamW", "optimizer._partial_=true", "optimizer.weight_decay=1"]
    recipe = build(text, *optimizer, "optimizer.betas=[0.8,0.9]")
    import torch

    assert recipe.parallelizer.mp_policy.param_dtype is torch.bfloat16
    assert isinstance(recipe.optimizer, functools.partial) and recipe.optimizer.func is torch.optim.AdamW
    assert recipe.optimizer.keywords == {"weight_decay": 1, "betas": (0.8, 0.9)}
    error = refusal(text, "parallelizer.mp_policy.param_dtype=bf16")
    key = "parallelizer.mp_policy.param_dtype"
    assert_error(error, "invalid_choice", key, values=("'bf16'",), fix=f"{key}=bfloat16")
    assert refusal(text, *optimizer, "optimizer.wieght_decay=1").fix == "optimizer.weight_decay=1"
    assert_error(refusal(text, optimizer[0]), "missing_key", "optimizer.params")


def test_partial_is_not_for_our_own_nodes() -> None:
    text = GOOD + "mesh: {_target_: automodel_cli.distributed.mesh_config.MeshConfig, _partial_: true}\n"
    assert_error(refusal(text), "not_supported", "mesh._partial_", values=("true",))


def test_a_bug_in_a_trusted_node_is_reported_with_its_key(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "buggy_nodes.py").write_text("def node(x: int = 1):\n    raise RuntimeError('boom')\n")
    monkeypatch.syspath_prepend(str(here))
    Path("x.yaml").write_text(GOOD.replace("toy_recipe.nodes.Optimizer", "buggy_nodes.node"))
    with raises(ConfigError, "invalid_arguments", keys=("optimizer",), values=("node", "boom")):
        check_config(compose("x.yaml"), Trust(packages=("toy_recipe", "buggy_nodes")))
    with pytest.raises(ConfigError) as error:
        check_config(compose("x.yaml", ["mesh.dp_size=0"]), Trust(packages=("toy_recipe", "buggy_nodes")))
    assert "boom" not in str(error.value), "foreign code runs only when nothing else is wrong"


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (["model.tokenizer={chat_template: x}"], "model.tokenizer.chat_template", None),
        (["model.tokenizer.banana=3"], "model.tokenizer.banana", "automodel options model.tokenizer"),
        (["model.tokenizer=3"], "model.tokenizer", "model.tokenizer='\"3\"'"),
        (
            ["~optimizer", "optimizer={lr: 3}"],
            "optimizer",
            "optimizer._target_=automodel_cli.training.optimizers.nodes.AdamW",
        ),
        (
            ["logging.trackers=[{space_id: me/x}]"],
            "logging.trackers.0",
            "logging.trackers.0._target_=automodel_cli.training.trackers.Trackio",
        ),
        (["parallelizer.tp_plan={a.b: 3}", "mesh.tp_size=2"], "parallelizer.tp_plan", "parallelizer.tp_plan=null"),
        (["parallelizer.tp_plan=3", "mesh.tp_size=2"], "parallelizer.tp_plan", "parallelizer.tp_plan=null"),
        (["data.packing=false"], "data.packing", "data.packing=none"),
        (["data.packing=off"], "data.packing", "data.packing=none"),
        (["data.packing=true"], "data.packing", "data.packing=best_fit"),
        (["data.streaming=true"], "data.streaming", "data.streaming={}"),
        (["data.streaming=yes"], "data.streaming", "data.streaming={}"),
        (["logging.profile=false"], "logging.profile", "logging.profile=null"),
        (["validation.every=false"], "validation.every", "validation.every=null"),
    ],
)
def test_a_mapping_or_a_switch_in_place_of_something_else(overrides: list[str], key: str, fix: str | None) -> None:
    with pytest.raises(ConfigError) as error:
        check_config(compose("sft", ["model.pretrained=x/y", "data.path=x/y", "train.global_batch_size=4", *overrides]))
    assert (error.value.keys, error.value.fix) == ((key,), fix)
    assert error.value.code in ("wrong_type", "invalid_choice", "invalid_value", "unknown_key"), error.value


def test_no_key_of_ours_takes_just_anything() -> None:
    """Where an annotation is Any nothing is checked: plans of tensor parallelism, which their node reads, functions."""
    from automodel_cli.config.keys import reference as key_reference

    free = {key.name for node in key_reference.nodes() for key in node.keys if key.kind == "any node"}
    assert free == {"parallelizer.tp_plan", "rollout.advantage_estimator.function"}


@pytest.mark.parametrize(
    "override",
    [
        "train.precision=bf16",
        "checkpoint.best=true",
        "objective.value_coef=1",
        "train.steps=4",
    ],
)
def test_another_word_is_no_typo(override: str) -> None:
    from automodel_cli.config.keys.suggestions import suggest

    key, _, value = override.partition("=")
    found = suggest(key, value, _keys_of_sft())
    assert found is None or found.fix is None, found


@pytest.mark.parametrize("name", ["model.lora.rank", "checkpoint.resume", "optimizer.weight_decay", "data.seq_len"])
def test_one_slip_of_the_hand_is_a_typo(name: str) -> None:
    """A letter left out, doubled, replaced, or swapped with its neighbor, anywhere in the word."""
    from automodel_cli.config.keys.suggestions import suggest

    known = _keys_of_sft()
    section, _, leaf = name.rpartition(".")
    for i in range(len(leaf)):
        swapped = leaf[:i] + leaf[i + 1 : i + 2] + leaf[i] + leaf[i + 2 :]
        for typo in (leaf[:i] + leaf[i + 1 :], leaf[:i] + leaf[i] + leaf[i:], leaf[:i] + "x" + leaf[i + 1 :], swapped):
            if typo != leaf:
                found = suggest(f"{section}.{typo}", 3, known)
                assert found is not None and found.fix == f"{name}=3", typo


def _keys_of_sft() -> list[str]:
    from automodel_cli.config import schema
    from automodel_cli.config.security.targets import resolve

    optimizer = schema.keys(resolve("automodel_cli.training.optimizers.nodes.AdamW"), "optimizer.")
    return [*schema.keys(resolve("automodel_cli.recipes.sft.SFTRecipe")), *optimizer]


@pytest.mark.parametrize("overrides", [["objective=kto"], ["objective._target_=automodel_cli.objectives.kto.KTO"]])
def test_keys_of_the_objective_that_was_replaced_are_named(here: Path, overrides: list[str]) -> None:
    """A file sets keys of one node, the command line names another: the fix takes them away, and works."""
    rows = "model: {pretrained: x/y}\ndata: {path: x/y}\ntrain: {global_batch_size: 4}\n"
    Path("x.yaml").write_text(f"defaults: [dpo, _self_]\n{rows}objective: {{beta: 0.3, loss: ipo}}\n")
    with pytest.raises(ConfigError) as error:
        check_config(compose("x.yaml", overrides))
    assert_error(error.value, "unknown_key", "objective.loss", values=("automodel_cli.objectives.dpo.DPO", "KTO"))
    assert error.value.fix == "~objective.loss, or objective=dpo"
    recipe: Any = check_config(compose("x.yaml", [*overrides, "~objective.loss"]))
    assert (type(recipe.objective).__name__, recipe.objective.beta) == ("KTO", 0.3)


@pytest.mark.parametrize(
    ("overrides", "key", "fix"),
    [
        (
            ["logging.trackers=[wandb]", "logging.trackers.mode=offline"],
            None,
            "'logging.trackers=[{_target_: automodel_cli.training.trackers.WandB, mode: offline}]'",
        ),
        (["logging.trackers=[nowhere]"], "logging.trackers.0", "logging.trackers.0=tensorboard"),
        (["logging.trackers=[mlflow]"], "logging.trackers", "pip install mlflow"),
        (
            ["logging.trackers=[{_target_: automodel_cli.training.trackers.MLflow}]"],
            "logging.trackers.0",
            "pip install mlflow",
        ),
    ],
)
def test_trackers_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], key: str | None, fix: str
) -> None:
    """By name and as nodes, with keys that lead into the list, and without their package."""

    monkeypatch.setattr(
        "automodel_cli.config.value_checks.find_spec", lambda name: None
    )  # no such package is installed here
    with pytest.raises(ConfigError) as error:
        check_config(compose("quickstart", overrides))
    assert error.value.fix == fix
    if key is not None:
        assert error.value.keys == (key,)


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("optimizer.lr=inf", "finite"),
        ("optimizer.lr=1e400", "finite"),
        ("optimizer.weight_decay=-inf", "finite"),
        ("seed=-1", 0),
        ("seed=100000000000000000000", 64),
        ("train.max_steps=1" + "0" * 400, 64),
    ],
)
def test_a_number_that_no_setting_can_be_is_refused(override: str, rule: object) -> None:
    with raises(ConfigError, "out_of_range", keys=(override.partition("=")[0],), values=(rule,)):
        check_config(compose("quickstart", [override]))


@pytest.mark.parametrize("key", ["a.b", "optimizer.lr", "optimizer.lr.x", "x."])
def test_a_key_with_a_dot_is_no_section(tmp_path: Path, key: str) -> None:
    (tmp_path / "x.yaml").write_text(f'defaults: [quickstart, _self_]\n"{key}": 1\n')
    with raises(ConfigError, "invalid_yaml", keys=(key,)):
        check_config(compose(tmp_path / "x.yaml"))


def test_names_of_modules_may_have_dots(tmp_path: Path) -> None:
    plan = "parallelizer: {tp_plan: {model.layers.*.mlp.up_proj: colwise}}"
    (tmp_path / "x.yaml").write_text(f"defaults: [quickstart, _self_]\n{plan}\nmesh: {{tp_size: 2}}\n")
    assert check_config(compose(tmp_path / "x.yaml")).parallelizer.tp_plan == {"model.layers.*.mlp.up_proj": "colwise"}


@pytest.mark.parametrize(("value", "code"), [("many", "wrong_type"), (-4, "out_of_range")])
def test_an_error_shows_the_value_of_a_name_with_dots(tmp_path: Path, value: object, code: str) -> None:
    name = "layers.0.q_proj"
    lora = f"model: {{lora: {{rank_pattern: {{{name}: {value}}}}}}}"
    (tmp_path / "x.yaml").write_text(f"defaults: [quickstart, _self_]\n{lora}\n")
    with raises(ConfigError, code, keys=(f"model.lora.rank_pattern.{name}",)) as error:
        check_config(compose(tmp_path / "x.yaml"))
    assert f"{name}={value} (" in (error.value.origin or "")


@pytest.mark.parametrize(
    ("override", "fix"),
    [("optimizr=muon", "optimizer=muon"), ("modle.vison.tower=frozen", "model.vision.tower=frozen")],
)
def test_a_misspelt_section_of_a_bundled_recipe(override: str, fix: str) -> None:
    with raises(ConfigError, "unknown_key", fix=fix):
        check_config(compose("quickstart_vlm", [override]))
