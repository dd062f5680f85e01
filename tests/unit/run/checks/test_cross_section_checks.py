"""Rules between sections: each names the keys, the values and a fix."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

from automodel_cli.config.check import check_config
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.errors import ConfigError
from automodel_cli.data.config import DataConfig
from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.models.config import ModelConfig
from automodel_cli.run.checks.cross_section_checks import check_profile, check_validation
from automodel_cli.run.checks.module_names import check_names
from automodel_cli.training.config import ProfileConfig, ValidationConfig
from automodel_cli.training.optimizers.nodes import Muon
from tests import tiny
from tests.errors import raises

HELD_OUT = [{"validation_size": 3}, {"validation_path": "y"}, {"validation_split": "test"}]


@pytest.mark.parametrize("asked", [{"every": 10}, {"at_start": True}, {"num_batches": 2}])
def test_a_validation_that_was_asked_for_has_rows(asked):
    for rows in HELD_OUT:
        check_validation(ValidationConfig(**asked), DataConfig(path="x", **rows))
    key = f"validation.{next(iter(asked))}"
    with raises(ConfigError, "requires_setting", keys=(key,), values=(key,), fix="data.validation_size=0.02"):
        check_validation(ValidationConfig(**asked), DataConfig(path="x"))


def test_tasks_are_asked_without_rows_but_not_in_batches():
    tasks = {"held_out": object()}
    check_validation(ValidationConfig(every=10, tasks=tasks), DataConfig(path="x"))
    with raises(ConfigError, "requires_setting", keys=("validation.num_batches",), values=(2,)):
        check_validation(ValidationConfig(every=10, num_batches=2, tasks=tasks), DataConfig(path="x"))


def test_nothing_to_validate_on_is_no_fault_where_nothing_was_asked():
    check_validation(ValidationConfig(), DataConfig(path="x"))


def test_a_url_for_runs_needs_what_writes_to_it() -> None:
    with raises(ConfigError, "invalid_value", keys=("output_dir",), values=("s4",), fix="output_dir=runs"):
        check_config(compose("quickstart", ["output_dir=s4://bucket/runs"]))
    check_config(compose("quickstart", ["output_dir=runs:old/2026"]))
    check_config(compose("quickstart", ["output_dir=file:///tmp/runs"]))
    if importlib.util.find_spec("s3fs") is None:
        fix = "pip install 'automodel-cli[s3]'"
        with raises(ConfigError, "missing_package", keys=("output_dir",), values=("s3fs",), fix=fix):
            check_config(compose("quickstart", ["output_dir=s3://bucket/runs"]))


CHOSEN = {
    "a group too small": (["objective=best_of_n", "objective.num_kept=9"], ("out_of_range", "objective", 9)),
    "a baseline": (
        ["objective=best_of_n", "rollout.advantage_estimator=batch"],
        ("no_effect", "rollout.advantage_estimator", "BestOfN"),
    ),
    "no difference in scale": (
        ["objective=online_dpo", "rollout.reward_scaling=mean", "rollout.normalize_advantages=true"],
        ("no_effect", "rollout.reward_scaling", "OnlineDPO"),
    ),
    "no room for two": (
        ["objective=online_dpo", "rollout.max_new_tokens=64"],
        ("sequence_length", "data.seq_len", "two prompts"),
    ),
    "no reward": (
        ["objective=online_dpo", "rewards=none", "teacher={pretrained: runs/quickstart/export}"],
        ("missing_key", "rewards", "reward"),
    ),
    "an episode in half a row": (
        [
            "objective=online_dpo",
            "rollout.environment={_target_: automodel_cli.rollout.environments.calculator.Calculator, max_turns: 2}",
        ],
        ("unsupported_combination", "rollout.environment", "OnlineDPO"),
    ),
}


@pytest.mark.parametrize("case", CHOSEN)
def test_objectives_that_choose_samples_refuse(case):
    overrides, (code, key, value) = CHOSEN[case]
    with raises(ConfigError, code, keys=(key,), values=(value,)):
        check_config(compose("quickstart_grpo", overrides))


def test_no_storage_library_is_imported_for_a_path() -> None:
    code = (
        "import sys, automodel_cli.run.checks.cross_section_checks as checks, automodel_cli.run.remote.remote_sync; "
        "checks.check_output_dir('runs'); "
    )
    done = subprocess.run([sys.executable, "-c", code + "assert 'fsspec' not in sys.modules"], check=False)
    assert done.returncode == 0


def test_ranks_that_record_are_ranks_of_the_run():
    check_profile(ProfileConfig(ranks=(0, 3)), 4)
    with pytest.raises(ConfigError) as refusal:
        check_profile(ProfileConfig(ranks=(0, 7)), 4)
    assert refusal.value.keys == ("logging.profile.ranks",)
    assert refusal.value.fix.strip("'") == "logging.profile.ranks=[0]"


class Names:
    """A recipe, as far as its names of modules go."""

    def __init__(self, adamw_names=Muon.adamw_names, tp_plan=None):
        self.optimizer = Muon(lr=0.01, adamw_names=adamw_names)
        self.parallelizer = FSDP2Config(tp_plan=tp_plan)
        self.model = ModelConfig(config=tiny.tiny_fields("llama"))


CORRECTED = {
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
}
PLAN = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}


@pytest.mark.parametrize(
    ("names", "fix"),
    [
        (Names(), None),  # the defaults are names of many families
        (Names(("lm_head", "mlp.down", "lora_A", "value_head")), None),
        (Names(("lm_head", "q_porj")), "optimizer.adamw_names=[lm_head,q_proj]"),
        (Names(tp_plan=PLAN | {"model.layers.0.self_attn.q_proj": "colwise"}), None),
        (
            Names(tp_plan=PLAN | {"model.layers.*.mlp.gate_porj": "colwise"}),
            # Overrides merge mappings, so that the fix removes the old entries first.
            "parallelizer.tp_plan={} 'parallelizer.tp_plan={"
            + ", ".join(f"{name}: {style}" for name, style in CORRECTED.items())
            + "}",
        ),
    ],
)
def test_names_of_modules_are_the_models(names, fix):
    config = tiny.tiny_config("llama")
    if fix is None:
        return check_names(names.optimizer, names.parallelizer, names.model, config)
    with pytest.raises(ConfigError) as refusal:
        check_names(names.optimizer, names.parallelizer, names.model, config)
    assert refusal.value.fix.strip("'") == fix
