"""Configs of other tools: every key is translated or named with a reason, and the result is a config of ours."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from automodel_cli.cli import completion_values
from automodel_cli.cli.main import run
from automodel_cli.config.check import check_config
from automodel_cli.config.composition import bundled_recipes
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.diagnostics import format_value
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.importer_registry import TABLES, recognise
from automodel_cli.config.importers.framework import flatten_keys
from automodel_cli.config.importers.write import imported, read_config
from tests.errors import assert_error, raises

pytestmark = pytest.mark.slow

VECTORS = Path(__file__).parents[3] / "vectors/import"
FILES = sorted(path.name for path in VECTORS.iterdir())
NOT_HERE = {"missing_file", "missing_package"}
"""Codes of what this machine lacks, and the words for it in the head of a converted file."""
NOT_HERE_LINES = r"\[missing_(file|package)\]|requires the package|does not exist"
"""What is missing on this machine and not in the file."""

DEFAULT = "(not in the file)"

# Worked out by hand from the documentation of each tool, for 8 ranks.
EXPECTED: dict[str, dict[str, Any]] = {
    "axolotl_lora.yml": {
        "train.global_batch_size": 32,  # 2 x 2 x 8
        "optimizer._target_": "automodel_cli.training.optimizers.nodes.AdamW8bit",
        "optimizer.betas": [0.9, 0.999],
        "data.loss_mask": "assistant",
        "lr_scheduler.warmup_steps": 10,
        "data.validation_size": 0.1,
    },
    "axolotl_vision.yaml": {
        "_target_": "automodel_cli.recipes.vlm.VLMRecipe",
        "train.global_batch_size": 32,  # 1 x 4 x 8
        "model.lora.target_modules": "all-linear",
        "model.vision.tower": "frozen",
        "model.vision.projector": "frozen",
        "data.truncation": "drop",
        "data.seq_len": 8192,
    },
    "llama_factory_vision.yaml": {
        "_target_": "automodel_cli.recipes.vlm.VLMRecipe",
        "model.vision.tower": "frozen",
        "model.vision.projector": "trained",
        "model.vision.text": "trained",
        "data.media_dir": "data",
        "data.truncation": "drop",
        "optimizer.lr": 1e-5,
    },
    "nemo_automodel_vision.yaml": {
        "_target_": "automodel_cli.recipes.vlm.VLMRecipe",
        "model.vision.tower": "frozen",
        "model.vision.projector": DEFAULT,
        "model.vision.text": "trained",
        "train.freeze": ["*embed*"],
        "train.global_batch_size": 8,
    },
    "trl_vision.yaml": {
        "_target_": "automodel_cli.recipes.vlm.VLMRecipe",
        "data.loss_mask": "assistant",
        "data.truncation": "error",  # max_length: null cuts no row there
        "data.seq_len": 2048,
        "train.global_batch_size": 512,  # 8 x 8 x 8
        "model.vision.tower": DEFAULT,
    },
    "axolotl_tp_cp.yml": {
        "train.global_batch_size": 8,  # 1 x 4 x 8 / (2 x 2)
        "data.packing": "none",
        "optimizer.betas": [0.9, 0.95],
        "train.max_grad_norm": 0.5,
        "data.datasets": [
            {
                "column_mapping": {"messages": "conversations"},
                "format": "messages",
                "path": "fozziethebeat/alpaca_messages_2k_test",
            },
            {"format": "messages", "path": "./more.jsonl"},
        ],
    },
    "llama_factory_lora.yaml": {
        "train.global_batch_size": 64,
        "model.lora.alpha": 16.0,  # twice the rank
        "data.seq_len": 2048,
        "data.packing": "none",
        "optimizer.weight_decay": 0.0,
        "logging.trackers": [],
    },
    "llama_factory_dpo.yaml": {
        "objective.beta": 0.2,
        "objective.nll_weight": 0.1,
        "train.max_steps": 300,
        "train.epochs": None,
        "model.lora": None,
    },
    "trl_sft.yaml": {
        "train.global_batch_size": 128,
        "data.loss_mask": "assistant",
        "data.truncation": "truncate",
        "lr_scheduler.min_lr_ratio": 0.1,
        "model.lora.dropout": 0.05,
        "seed": 7,
    },
    "trl_grpo.yaml": {
        "train.global_batch_size": 256,
        "rollout.prompts_per_step": 16,
        "objective.loss_aggregation": "constant",
        "objective.normalization_length": 1024,
        "objective.clip_high": 0.28,
        "objective.dual_clip_ratio": 4.0,
        "rollout.normalize_advantages": False,
        "rollout.engine.url": "http://127.0.0.1:8000",
        "lr_scheduler._target_": "automodel_cli.training.optimizers.lr_scheduler.Linear",
    },
    "nemo_automodel_peft.yaml": {
        "train.global_batch_size": 64,
        "lr_scheduler.min_lr_ratio": 0.1,
        "model.lora.rank": 8,
        "data.validation_split": "validation",
        "data.shuffle": False,
    },
    "nemo_automodel_moe.yaml": {
        "mesh.pp_size": 2,
        "mesh.ep_size": 4,
        "pipeline.schedule": "interleaved_1f1b",
        "pipeline.layers_per_stage": 2,
        "data.seq_len": 4096,
        "data.packing": "best_fit",
    },
    "nemo_automodel_fp8.yaml": {
        "model.fp8.recipe": "tensorwise",
        "model.fp8.exclude_modules": ["o_proj"],
        "parallelizer.enable_compile": "auto",
        "model.dtype": "bfloat16",
        "train.max_steps": 100,
        "data.seq_len": 8192,
    },
    "verl_grpo.yaml": {
        "train.global_batch_size": 1280,  # 256 prompts x 5
        "rollout.prompts_per_step": 1024,
        "data.seq_len": 1536,
        "data.truncation": "drop",
        "objective.dual_clip_ratio": 3.0,
        "objective.kl_type": "k3",
        "optimizer.weight_decay": 0.01,
    },
    "verl_sft.yaml": {
        "data.column_mapping": {"prompt": "question", "completion": "answer"},
        "lr_scheduler.warmup_ratio": 0.1,
        "checkpoint.every": None,
        "output_dir": "checkpoints/gsm8k-sft/test",
        "model.lora.rank": 32,
    },
    "prime_rl_rl.toml": {
        "rollout.prompts_per_step": 8,  # 128 / 16
        "train.global_batch_size": 128,
        "rollout.max_new_tokens": 128,
        "optimizer.lr": 3e-6,
        "checkpoint.every": None,
    },
    "prime_rl_sft.toml": {
        "optimizer._target_": "automodel_cli.training.optimizers.nodes.Muon",
        "optimizer.adamw_betas": [0.9, 0.999],
        "lr_scheduler._target_": "automodel_cli.training.optimizers.lr_scheduler.WSD",
        "lr_scheduler.decay_steps": 30,
        "data.packing": "wrapped",
        "parallelizer.activation_checkpointing": 2,
    },
}


def decisions(text: str) -> list[str]:
    """What a translated file says at its top that the user must decide."""
    head = text.partition("defaults:")[0]
    return re.findall(r"^# - (.*)$", head, flags=re.M)


def translated(tmp_path: Path, theirs: str, was: str, now: str) -> str:
    """The file of ours for one of theirs in which `was` is replaced."""
    text = (VECTORS / theirs).read_text()
    assert was in text
    (tmp_path / f"theirs{Path(theirs).suffix}").write_text(text.replace(was, now))
    return imported(tmp_path / f"theirs{Path(theirs).suffix}", gpus=8)


def at(tree: Any, key: str) -> Any:
    for name in key.split("."):
        if name not in tree:
            return DEFAULT
        tree = tree[name]
    return tree


@pytest.mark.parametrize("name", FILES)
def test_a_config_becomes_one_of_ours_with_these_values(name: str, tmp_path: Path) -> None:
    (tmp_path / "ours.yaml").write_text(imported(VECTORS / name, gpus=8))
    composed = compose(str(tmp_path / "ours.yaml"))
    assert {key: at(composed.tree, key) for key in EXPECTED[name]} == EXPECTED[name]
    decay = at(composed.tree, "optimizer.weight_decay")  # DEFAULT: ours, which is that of torch
    assert (at(composed.tree, "optimizer.decay_embeddings") is True) == (decay == DEFAULT or decay > 0)
    try:
        recipe = check_config(composed, untrusted=[])  # as `automodel check` does
    except ConfigError as error:
        codes = {code for code, _ in error.problems} or {error.code}
        assert codes <= NOT_HERE, str(error)
        return
    missing = [error for error in recipe.missing_files() if error.code not in NOT_HERE]
    assert missing == []


@pytest.mark.parametrize("name", FILES)
def test_every_key_of_the_source_is_translated_or_named_with_a_reason(name: str) -> None:
    text = imported(VECTORS / name)
    source = flatten_keys(read_config(VECTORS / name))
    for key, value in source.items():
        translated = f"{key}={format_value(value, 60)}"
        reason = re.search(rf"^#   {re.escape(key)}: .*   \S", text, flags=re.M)
        assert translated in text or reason, f"{key} of {name} is lost"
    assert "not known to this translation" not in text


@pytest.mark.parametrize("name", FILES)
def test_the_tool_is_told_by_the_keys(name: str) -> None:
    found = recognise(read_config(VECTORS / name))
    assert found is not None and name.startswith(found.slug.replace("-", "_"))


def test_cispo_of_trl_bounds_the_ratio_at_its_epsilon_high_and_nowhere_below(tmp_path: Path) -> None:
    """`torch.clamp(ratio, max=epsilon_high)` there, [1 - clip_low, 1 + clip_high] here."""
    theirs = (VECTORS / "trl_grpo.yaml").read_text().replace("loss_type: dr_grpo", "loss_type: cispo")
    (tmp_path / "theirs.yaml").write_text(theirs.replace("epsilon_high: 0.28", "epsilon_high: 5.0"))
    (tmp_path / "ours.yaml").write_text(imported(tmp_path / "theirs.yaml", gpus=8))
    objective = compose(str(tmp_path / "ours.yaml")).tree["objective"]
    assert [objective[key] for key in ("policy_loss", "clip_low", "clip_high")] == ["cispo", 1.0, 4.0]


@pytest.mark.parametrize(
    ("theirs", "was", "now", "wanted"),
    [
        (
            "verl_grpo.yaml",
            "adv_estimator: grpo",
            "adv_estimator: rloo",  # scores minus the mean of the others there, divided by nothing
            {
                "rollout.leave_one_out": True,
                "rollout.normalize_advantages": False,
                "rollout.advantage_estimator": DEFAULT,
            },
        ),
        (
            "verl_grpo.yaml",
            "adv_estimator: grpo",
            "adv_estimator: gae\n  gamma: 0.99\n  lam: 0.9",
            {
                "objective._target_": "automodel_cli.objectives.ppo.PPO",
                "objective.value_clip_range": 0.5,
                "objective.kl_placement": "loss",
                "rollout.advantage_estimator": "critic",
                "rollout.gamma": 0.99,
                "rollout.gae_lambda": 0.9,
            },
        ),
        (
            "verl_grpo.yaml",
            "adv_estimator: grpo\n  use_kl_in_reward: false",
            "use_kl_in_reward: true\n  kl_penalty: mse",  # gae is their default; the loss has its own KL here
            {
                "rollout.advantage_estimator": "critic",
                "rollout.gae_lambda": 1.0,
                "objective.kl_coef": 0.001,
                "objective.kl_output_clamp": DEFAULT,
                "objective.kl_score_term": False,
            },
        ),
        (
            "verl_grpo.yaml",
            "kl_loss_type: low_var_kl",
            "kl_loss_type: mse",
            {
                "objective.kl_type": "k2",
                "objective.kl_input_clamp": None,
                "objective.kl_output_clamp": None,
                "objective.kl_score_term": False,
            },
        ),
        (
            "trl_grpo.yaml",
            "beta: 0.001",
            "beta: 0.04",
            {
                "objective.kl_coef": 0.04,
                "objective.kl_bias_correction": True,
                "objective.kl_score_term": DEFAULT,
                "objective.kl_output_clamp": None,
            },
        ),
        (
            "trl_grpo.yaml",
            "beta: 0.001",
            "beta: 0.04\nuse_bias_correction_kl: false",
            {
                "objective.kl_bias_correction": DEFAULT,
                "objective.kl_score_term": False,
                "objective.kl_input_clamp": None,
            },
        ),
        (
            "trl_grpo.yaml",
            "beta: 0.001",
            "beta: 0.0\nuse_bias_correction_kl: true",
            {"objective.kl_coef": 0.0, "objective.kl_bias_correction": DEFAULT, "objective.kl_input_clamp": DEFAULT},
        ),
        (
            "verl_grpo.yaml",
            "adv_estimator: grpo",
            "adv_estimator: reinforce_plus_plus",
            {"rollout.advantage_estimator": "batch", "rollout.normalize_advantages": DEFAULT, "rollout.gamma": 1.0},
        ),
        (
            "verl_grpo.yaml",
            "clip_ratio: 0.2",
            "policy_loss: {loss_mode: gspo}",
            {
                "objective.importance_sampling_level": "sequence_token",
                "objective.loss_aggregation": "sequence",
                "objective.dual_clip_ratio": DEFAULT,
            },
        ),
        (
            "verl_grpo.yaml",
            "    n: 5",
            "    n: 5\n    val_kwargs: {n: 4, temperature: 0.6, do_sample: true}",
            {"rollout.validation_samples": 4, "rollout.validation_temperature": 0.6},
        ),
        (
            "trl_grpo.yaml",
            "loss_type: dr_grpo",
            "loss_type: sapo\nsapo_temperature_neg: 1.1",
            {
                "objective.policy_loss": "sapo",
                "objective.loss_aggregation": "sequence",
                "objective.sapo_negative": 1.1,
                "objective.clip_high": DEFAULT,
                "objective.dual_clip_ratio": DEFAULT,
            },
        ),
        (
            "verl_grpo.yaml",
            "clip_ratio: 0.2",
            "policy_loss: {loss_mode: sapo}\n    tau_neg: 1.2",  # core_algos.py: means over sequences in any case
            {
                "objective.policy_loss": "sapo",
                "objective.sapo_positive": 1.0,
                "objective.sapo_negative": 1.2,
                "objective.loss_aggregation": "sequence",
                "objective.clip_high": DEFAULT,
                "objective.dual_clip_ratio": DEFAULT,
            },
        ),
        (
            "verl_grpo.yaml",
            "clip_ratio: 0.2",
            "policy_loss: {loss_mode: gpg}",  # -A log p
            {
                "objective.policy_loss": "reinforce",
                "objective.importance_sampling_level": "on_policy",
                "objective.clip_low": DEFAULT,
            },
        ),
        (
            "verl_grpo.yaml",
            "kl_loss_type: low_var_kl",
            "kl_loss_type: k3+",  # the value of k3, the gradient of k2
            {"objective.kl_type": "k2", "objective.kl_score_term": False, "objective.kl_output_clamp": None},
        ),
        (
            "verl_grpo.yaml",
            "clip_ratio: 0.2\n    loss_agg_mode: token-mean",
            "policy_loss: {loss_mode: cispo}\n    loss_agg_mode: token-mean",
            {
                "objective.policy_loss": "cispo",
                "objective.loss_aggregation": "token",
                "objective.dual_clip_ratio": DEFAULT,
            },
        ),
        (
            "verl_grpo.yaml",
            "clip_ratio: 0.2\n    loss_agg_mode: token-mean",
            "clip_ratio: 0.2\n    loss_agg_mode: seq-mean-token-sum",  # sum over tokens, mean over responses
            {"objective.loss_aggregation": "constant", "objective.normalization_length": 1},
        ),
        ("trl_grpo.yaml", "loss_type: dr_grpo", "entropy_coef: 0.01", {"objective.entropy_coef": 0.01}),
        (
            "trl_grpo.yaml",
            "scale_rewards: false",
            "scale_rewards: batch",
            {"rollout.reward_scaling": "batch", "rollout.normalize_advantages": DEFAULT},
        ),
    ],
)
def test_another_algorithm_of_theirs_is_that_algorithm_here(
    theirs: str, was: str, now: str, wanted: dict[str, Any], tmp_path: Path
) -> None:
    text = (VECTORS / theirs).read_text()
    assert was in text
    (tmp_path / "theirs.yaml").write_text(text.replace(was, now))
    (tmp_path / "ours.yaml").write_text(imported(tmp_path / "theirs.yaml", gpus=8))
    composed = compose(str(tmp_path / "ours.yaml"))
    assert {key: at(composed.tree, key) for key in wanted} == wanted
    with pytest.raises(ConfigError, match=NOT_HERE_LINES):  # nothing else is wrong with it
        for missing in check_config(composed, untrusted=[]).missing_files():
            raise missing


QAT = "qat: {weight_dtype: float8_e4m3fn, activation_dtype: float8_e4m3fn, fake_quant_after_n_steps: 10}"


@pytest.mark.parametrize(
    ("theirs", "was", "more", "wanted"),
    [
        ("axolotl_lora.yml", "adapter: lora", "peft_use_dora: true", {"use_dora": True}),
        ("axolotl_lora.yml", "adapter: lora", "peft_use_rslora: true", {"use_rslora": True}),
        (
            "axolotl_lora.yml",
            "adapter: lora",
            "peft_init_lora_weights: pissa_niter_16",
            {"init_lora_weights": "pissa_niter_16"},
        ),
        ("axolotl_lora.yml", "adapter: lora", "peft_init_lora_weights: olora", {"init_lora_weights": "olora"}),
        ("trl_sft.yaml", "lora_r: 32", "use_dora: true", {"use_dora": True}),
        ("trl_sft.yaml", "lora_r: 32", "use_rslora: true", {"use_rslora": True}),
        ("llama_factory_lora.yaml", "finetuning_type: lora", "use_dora: true", {"use_dora": True}),
        (
            "llama_factory_lora.yaml",
            "finetuning_type: lora",
            "pissa_init: true",
            {"init_lora_weights": "pissa_niter_16"},
        ),
        (
            "llama_factory_lora.yaml",
            "finetuning_type: lora",
            "pissa_init: true\npissa_iter: -1",
            {"init_lora_weights": "pissa"},
        ),
        (
            "nemo_automodel_peft.yaml",
            "  _target_: nemo_automodel.components._peft.lora.PeftConfig",
            "  use_dora: true",
            {"use_dora": True},
        ),
    ],
)
def test_variants_of_adapters_keep_their_names(
    theirs: str, was: str, more: str, wanted: dict[str, Any], tmp_path: Path
) -> None:
    text = translated(tmp_path, theirs, was, f"{was}\n{more}")
    (tmp_path / "ours.yaml").write_text(text)
    lora = compose(str(tmp_path / "ours.yaml")).tree["model"]["lora"]
    assert {key: lora.get(key) for key in wanted} == wanted
    assert [line for line in decisions(text) if line.startswith("check:") and not re.search(NOT_HERE_LINES, line)] == []


def test_quantization_aware_training_of_axolotl(tmp_path: Path) -> None:
    """Beside an adapter, the check of the translation names the conflict."""
    text = translated(tmp_path, "axolotl_lora.yml", "adapter: lora", f"adapter: lora\n{QAT}")
    assert any("unsupported_combination" in line and "lora" in line for line in decisions(text))
    own = re.sub(r"^(adapter|lora_).*\n", "", (VECTORS / "axolotl_lora.yml").read_text(), flags=re.M)
    (tmp_path / "full.yml").write_text(f"{own}\n{QAT}\n")
    (tmp_path / "ours.yaml").write_text(imported(tmp_path / "full.yml", gpus=8))
    model = compose(str(tmp_path / "ours.yaml")).tree["model"]
    assert model["qat"] == {"weight_dtype": "fp8", "activation_dtype": "fp8", "fake_quant_after_n_steps": 10}
    assert model.get("lora") is None


def test_an_estimator_without_a_counterpart_is_named(tmp_path: Path) -> None:
    text = (VECTORS / "verl_grpo.yaml").read_text().replace("adv_estimator: grpo", "adv_estimator: remax")
    (tmp_path / "theirs.yaml").write_text(text)
    assert decisions(imported(tmp_path / "theirs.yaml"))[0].startswith("algorithm.adv_estimator=remax: ")


def test_a_key_that_no_table_knows_and_a_second_one_for_the_same_are_named(tmp_path: Path) -> None:
    """`filter_overlong_prompts` and `truncation` both are our truncation: the second must not vanish."""
    assert re.search(
        r"#   data.truncation: error   data.truncation is decided by", imported(VECTORS / "verl_grpo.yaml")
    )
    path = tmp_path / "x.yml"
    path.write_text((VECTORS / "axolotl_lora.yml").read_text() + "brand_new: {knob: 3}\n")
    assert "#   brand_new.knob: 3   not known to this translation" in imported(path)


@pytest.mark.parametrize("table", TABLES.values(), ids=lambda table: table.slug)
def test_a_table_names_keys_that_exist(table: Any) -> None:
    known = completion_values.keys("sft") | completion_values.keys("dpo") | completion_values.keys("grpo")
    known |= {"optimizer.momentum", "lr_scheduler.min_lr_ratio", "lr_scheduler.decay_steps"}
    for ours in [row.ours for row in table.rows.values() if row.ours] + [default.ours for default in table.defaults]:
        options = bundled_recipes.conf_dir() / ours
        assert ours in known or options.is_dir() or ours.startswith("model.lora."), f"{table.slug} names {ours}"


def test_a_file_of_no_known_tool_is_refused_with_the_option_that_names_one(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("lr: 1e-4\nsteps: 3\n")
    with raises(ConfigError, "unsupported_file_type", keys=("--from",), values=(path,)) as error:
        imported(path)
    assert "--from axolotl" in (error.value.fix or "")


def test_the_command_writes_a_file_and_never_over_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "mine.yaml")
    words = ["import-config", str(VECTORS / "trl_sft.yaml"), "--gpus", "2", "-o", out]
    assert run(words) == 0 and f"next  automodel check -c {out}" in capsys.readouterr().out
    assert compose(out).tree["train"]["global_batch_size"] == 32
    assert run(words) == 2
    assert_error(capsys.readouterr().err, "file_exists", values=(out,))


@pytest.mark.parametrize(
    ("theirs", "was", "now", "key", "wanted"),
    [
        ("verl_grpo.yaml", "clip_ratio: 0.2", "policy_loss: {loss_mode: geo_mean}", "loss_mode=geo_mean", {}),
        (
            "verl_grpo.yaml",
            "clip_ratio: 0.2\n    loss_agg_mode: token-mean",
            "policy_loss: {loss_mode: cispo}\n    loss_agg_mode: seq-mean-token-mean",
            "loss_agg_mode=seq-mean-token-mean",
            {"objective.policy_loss": "cispo", "objective.loss_aggregation": "token"},
        ),
        ("verl_grpo.yaml", "mode: token-mean", "mode: token-sum", "loss_agg_mode=token-sum", {}),
        ("verl_grpo.yaml", "kl_loss_type: low_var_kl", "kl_loss_type: abs", "kl_loss_type=abs", {}),
        ("verl_grpo.yaml", "adv_estimator: grpo", "adv_estimator: gpg", "adv_estimator=gpg", {}),
        (
            "trl_grpo.yaml",
            "loss_type: dr_grpo",
            "loss_type: luspo\nimportance_sampling_level: sequence",
            "loss_type=luspo",
            {"objective.importance_sampling_level": "token"},
        ),
        (
            "trl_grpo.yaml",
            "loss_type: dr_grpo",
            "loss_type: dapo\nimportance_sampling_level: sequence",
            "loss_type=dapo",
            {"objective.importance_sampling_level": "sequence", "objective.loss_aggregation": "sequence"},
        ),
        ("trl_grpo.yaml", "loss_type: dr_grpo", "loss_type: vespo\nvespo_k_pos: 2.0", "loss_type=vespo", {}),
        ("trl_grpo.yaml", "loss_type: dr_grpo", "use_adaptive_entropy: true", "use_adaptive_entropy=true", {}),
        ("trl_grpo.yaml", "loss_type: dr_grpo", "repetition_penalty: 1.1", "repetition_penalty=1.1", {}),
        ("trl_sft.yaml", "learning_rate: 2.0e-4", "loss_type: dft", "loss_type=dft", {}),
        ("trl_sft.yaml", "learning_rate: 2.0e-4", "use_bnb_nested_quant: true", "use_bnb_nested_quant=true", {}),
        (
            "verl_grpo.yaml",
            "\ntrainer:\n",
            "\ndistillation: {enabled: true}\ntrainer:\n",
            "distillation.enabled",
            {},
        ),
        ("trl_sft.yaml", "learning_rate: 2.0e-4", "brand_new: {knob: 3, off: false}", "brand_new.knob: not known", {}),
    ],
)
def test_what_has_no_counterpart_is_to_be_decided_at_the_top_and_the_rest_passes_the_check(
    theirs: str, was: str, now: str, key: str, wanted: dict[str, Any], tmp_path: Path
) -> None:
    text = translated(tmp_path, theirs, was, now)
    assert any(key in line for line in decisions(text)), text[:900]
    (tmp_path / "ours.yaml").write_text(text)
    composed = compose(str(tmp_path / "ours.yaml"))
    assert {key: at(composed.tree, key) for key in wanted} == wanted
    assert [line for line in decisions(text) if line.startswith("check:") and not re.search(NOT_HERE_LINES, line)] == []


def test_streaming_of_trl_is_ours_in_sft_only(tmp_path: Path) -> None:
    streams = "max_steps: 300\ndataset_streaming: true\ndataset_num_proc: 4"
    text = translated(tmp_path, "trl_sft.yaml", "num_train_epochs: 1", streams)
    (tmp_path / "ours.yaml").write_text(text)
    tree = compose(str(tmp_path / "ours.yaml")).tree
    assert at(tree, "data.streaming") is not None and at(tree, "train.max_steps") == 300
    assert "num_workers" not in tree["data"]
    assert not any("dataset_streaming" in line for line in decisions(text))
    assert not [line for line in decisions(text) if line.startswith("check:") and not re.search(NOT_HERE_LINES, line)]
    endless = translated(tmp_path, "trl_sft.yaml", "learning_rate: 2.0e-4", "dataset_streaming: true")
    assert any("max_steps" in line for line in decisions(endless))
    samples = translated(tmp_path, "trl_grpo.yaml", "loss_type: dr_grpo", "dataset_streaming: true")
    assert any("dataset_streaming=true" in line for line in decisions(samples))


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_the_check_refuses_says_so_at_its_top(name: str) -> None:
    text = imported(VECTORS / name, gpus=8)
    refused = [line for line in decisions(text) if line.startswith("check:")]
    assert all(re.search(NOT_HERE_LINES, line) for line in refused), refused
    if "_grpo" in name or "rl_rl" in name:
        assert any(line.startswith("rewards:") for line in decisions(text))


def test_what_the_check_finds_in_a_translation_is_named(tmp_path: Path) -> None:
    """A value that no table looks at: the top of the file has the sentence of the check, and its fix."""
    text = translated(tmp_path, "trl_sft.yaml", "learning_rate: 2.0e-4", "learning_rate: -1.0")
    assert any(line.startswith("check: ") and "-1" in line for line in decisions(text)), text[:900]


NEMO = """
recipe: {recipe}
step_scheduler: {{global_batch_size: 32, local_batch_size: 1, max_steps: 50}}
dist_env: {{backend: nccl}}
model: {{_target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained, pretrained_model_name_or_path: a/b}}
distributed: {{tp_size: None, cp_size: none, dp_size: None}}
optimizer: {{_target_: torch.optim.AdamW, lr: 1.0e-5}}
dataset: {{_target_: nemo_automodel.components.datasets.llm.ChatDataset, path_or_dataset_id: c/d}}
"""
KD = "nemo_automodel.recipes.llm.kd.KnowledgeDistillationRecipeForNextTokenPrediction"
SFT = "TrainFinetuneRecipeForNextTokenPrediction"


def from_nemo(tmp_path: Path, recipe: str, more: str = "") -> tuple[dict[str, Any], list[str]]:
    """The composed config of ours, and what is to be decided."""
    (tmp_path / "theirs.yaml").write_text(NEMO.format(recipe=recipe) + more)
    text = imported(tmp_path / "theirs.yaml", slug="nemo-automodel")
    (tmp_path / "ours.yaml").write_text(text)
    return compose(str(tmp_path / "ours.yaml")).tree, decisions(text)


@pytest.mark.parametrize(
    "recipe",
    [
        "nemo_automodel.recipes.vlm.kd.KnowledgeDistillationRecipeForVLM",
        "{_target_: nemo_automodel.recipes.diffusion.train.TrainDiffusionRecipe}",
        "FinetuneRecipeForMultimodal",
        "DiffusionLMSFTRecipe",
        "TrainEagle3Recipe",
        "TrainDSparkRecipe",
        "TrainDFlashRecipe",
        "TrainBiEncoderRecipe",
        "TrainCrossEncoderRecipe",
        "EmbeddingDistillRecipe",
        "TrainFinetuneRecipeForSequenceClassification",
        "BenchmarkingRecipeForNextTokenPrediction",
        "ARecipeOfTomorrow",
    ],
)
def test_recipes_of_nemo_automodel_that_train_something_else_are_refused_by_name(recipe: str, tmp_path: Path) -> None:
    name = re.sub(r".*[ .]|}", "", recipe)
    with raises(ConfigError, "not_supported", values=(name,), fix="--kind sft"):
        from_nemo(tmp_path, recipe)
    assert imported(tmp_path / "theirs.yaml", slug="nemo-automodel", kind="sft")


def test_a_vision_class_of_nemo_automodel_trains_pictures_unless_its_recipe_reads_text(tmp_path: Path) -> None:
    text = NEMO.format(recipe=SFT).replace("ForCausalLM", "ForImageTextToText")
    assert "\n  - sft\n" in written(tmp_path, text)
    without = "\n".join(line for line in text.splitlines() if not line.startswith("recipe:"))
    assert "\n  - vlm\n" in written(tmp_path, without)
    assert "\n  - sft\n" in written(tmp_path, without, kind="sft")


def written(folder: Path, text: str, **options: Any) -> str:
    (folder / "theirs.yaml").write_text(text)
    return imported(folder / "theirs.yaml", slug="nemo-automodel", **options)


def test_adapters_freeze_tower_and_projector_and_a_file_that_trains_them_is_to_decide(tmp_path: Path) -> None:
    text = (VECTORS / "llama_factory_vision.yaml").read_text().replace("finetuning_type: full", "finetuning_type: lora")
    (tmp_path / "theirs.yaml").write_text(text)
    translated = imported(tmp_path / "theirs.yaml")
    assert "freeze_multi_modal_projector: with model.lora" in translated
    (tmp_path / "ours.yaml").write_text(translated)
    vision = compose(str(tmp_path / "ours.yaml")).tree["model"]["vision"]
    assert (vision["tower"], vision["projector"]) == ("frozen", "frozen")


@pytest.mark.parametrize(
    ("theirs", "was", "now"),
    [
        ("llama_factory_vision.yaml", "stage: sft", "stage: dpo"),
        ("trl_vision.yaml", "max_length: null", "beta: 0.1"),
        ("axolotl_vision.yaml", "processor_type: AutoProcessor", "processor_type: AutoProcessor\nrl: dpo"),
    ],
)
def test_preferences_of_a_vision_model_read_pictures(tmp_path: Path, theirs: str, was: str, now: str) -> None:
    (tmp_path / "ours.yaml").write_text(translated(tmp_path, theirs, was, now))
    tree = compose(str(tmp_path / "ours.yaml")).tree
    assert tree["_target_"] == "automodel_cli.recipes.dpo.DPORecipe"
    assert tree["model"]["vision"] is not None
    assert tree["data"]["truncation"] == "drop"


def test_distillation_of_nemo_automodel_keeps_its_teacher_and_its_ratio(tmp_path: Path) -> None:
    more = "teacher_model: {pretrained_model_name_or_path: e/f, torch_dtype: bf16}\nkd_ratio: 0.7\n"
    tree, undecided = from_nemo(tmp_path, KD, more)
    assert tree["_target_"] == "automodel_cli.recipes.kd.KDRecipe" and undecided == []
    assert tree["teacher"] == {"pretrained": "e/f", "dtype": "bfloat16"}
    assert (tree["objective"]["kd_weight"], tree["objective"]["nll_weight"]) == (0.7, 0.3)
    assert tree["objective"]["top_k"] is None  # theirs compares the whole vocabulary
    _, undecided = from_nemo(tmp_path, KD, f"{more}kd_loss_fn: {{temperature: 2.0}}\n")
    assert [line.partition("=")[0] for line in undecided] == ["kd_loss_fn.temperature"]


def test_none_as_nemo_automodel_writes_it_is_no_size(tmp_path: Path) -> None:
    tree, undecided = from_nemo(tmp_path, SFT)
    assert "tp_size" not in tree.get("mesh", {}) and undecided == []


def test_four_bits_of_nemo_automodel(tmp_path: Path) -> None:
    four = "quantization: {load_in_4bit: true, bnb_4bit_quant_type: nf4}\n"
    tree, _ = from_nemo(tmp_path, SFT, f"{four}peft: {{dim: 8, alpha: 32, match_all_linear: true}}\n")
    assert tree["model"]["lora"]["quantization"] == "nf4"
    _, undecided = from_nemo(tmp_path, SFT, four)
    assert undecided[0].startswith("quantization.load_in_4bit=true")


def test_warm_up_stable_decay_of_nemo_automodel(tmp_path: Path) -> None:
    wsd = "lr_scheduler: {lr_decay_style: WSD, wsd_decay_steps: 10, lr_warmup_steps: 5, lr_wsd_decay_style: %s}\n"
    tree, undecided = from_nemo(tmp_path, SFT, wsd % "minus_sqrt")
    assert {key: tree["lr_scheduler"][key] for key in ("decay_steps", "decay", "warmup_steps")} == {
        "decay_steps": 10,
        "decay": "1-sqrt",
        "warmup_steps": 5,
    }
    assert undecided == []
    _, undecided = from_nemo(tmp_path, SFT, wsd % "exponential")
    assert undecided[0].startswith("lr_scheduler.lr_wsd_decay_style=exponential")
    _, undecided = from_nemo(tmp_path, SFT, "lr_scheduler: {lr_decay_style: inverse-square-root}\n")
    assert undecided[0].startswith("lr_scheduler.lr_decay_style=inverse-square-root")


@pytest.mark.parametrize(
    ("theirs", "was", "now", "wanted"),
    [
        ("trl_grpo.yaml", "report_to: wandb", "report_to: [wandb, tensorboard]\nwandb_project: p", {"project": "p"}),
        (
            "axolotl_lora.yml",
            "wandb_entity:",
            "wandb_entity: e\nwandb_mode: offline",
            {"entity": "e", "mode": "offline"},
        ),
        ("verl_grpo.yaml", "project_name: verl_grpo_example_gsm8k", "project_name: p", {"project": "p"}),
        ("nemo_automodel_moe.yaml", "project: automodel_convergence_runs", "group: g", {"group": "g"}),
        ("prime_rl_rl.toml", 'project = "reverse-text"', 'project = "p"', {"project": "p"}),
    ],
)
def test_weights_and_biases_keeps_its_project(
    theirs: str, was: str, now: str, wanted: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "ours.yaml").write_text(translated(tmp_path, theirs, was, now))
    trackers = compose(str(tmp_path / "ours.yaml")).tree["logging"]["trackers"]
    assert trackers[0]["_target_"].endswith("WandB") and wanted.items() <= trackers[0].items()
    assert trackers[1:] == (["tensorboard"] if "tensorboard" in now else [])
