"""The allow-list: hostile targets, aliases, and what a trusted package opens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.security.targets import is_node, resolve
from tests.errors import raises

HOSTILE = [
    "os.system",
    "posix.system",
    "builtins.eval",
    "builtins.exec",
    "builtins.__import__",
    "builtins.getattr",
    "subprocess.run",
    "subprocess.Popen",
    "functools.partial",
    "operator.attrgetter",
    "importlib.import_module",
    "pickle.loads",
    "shutil.rmtree",
    "logging.os.system",
    "torch.load",
    "torch.hub.load",
    "torch.os.system",
    "hydra.utils.call",
    "hydra.utils.instantiate",
    # attribute walks through what is allowed
    "automodel_cli.config.composition.compose.yaml.dump",
    "automodel_cli.config.check.os.system",
    "automodel_cli.config.instantiate.functools.partial",
    "automodel_cli.launch.local_launcher.shutil.rmtree",
    "automodel_cli.config.check.sys.modules",
    "automodel_cli.config.check.importlib.import_module",
    "torch.optim.lr_scheduler.partial",
    "torch.optim.lr_scheduler.types.FunctionType",
    "torch.optim.torch.load",
    "torch.optim.adam.torch.load",
    "torch.optim.AdamW.__init__.__globals__",
    "automodel_cli.__loader__.load_module",
    "automodel_cli.config.check.__builtins__",
    "automodel_cli.config.instantiate._located",
    # ours, but no config node
    "automodel_cli.config.check.check_config",
    "automodel_cli.cli.main.main",
    "automodel_cli.launch.local_launcher.run",
    "automodel_cli.config.errors.ConfigError",
    "automodel_cli.config.composition.compose.ConfigError",
    "automodel_cli.config.check",
    "automodel_cli.launch.rank_process.STATUS_DIR",
    # third-party functions
    "torch.distributed.fsdp.fully_shard",
    # no dotted name
    "os",
    "",
    "a..b",
    "automodel_cli.config.check.check_config()",
    "__main__.x",
]


@pytest.mark.parametrize("target", HOSTILE)
def test_hostile_targets_are_refused(target: str) -> None:
    with pytest.raises(ConfigError):
        resolve(target)


@pytest.mark.parametrize(
    ("target", "code", "value"),
    [
        (
            "automodel_cli.config.type_checking.targets.resolve",
            "invalid_target",
            "automodel_cli.config.security.targets",
        ),
        ("automodel_cli.config.check._Node", "invalid_target", "private"),
        ("torch.optim.lr_scheduler.partial", "untrusted_code", "functools.partial"),
        ("automodel_cli.config.check.check_config", "invalid_target", "function"),
        ("automodel_cli.config.errors.ConfigError", "invalid_target", "frozen dataclass"),
        ("automodel_cli.config.check", "invalid_target", "module"),
        ("torch.optim.AdamW.step", "invalid_target", "torch.optim.AdamW is not a module"),
        ("torch.load", "untrusted_code", "torch.optim"),
    ],
)
def test_each_rejected_target_has_its_rule(target: str, code: str, value: str) -> None:
    with raises(ConfigError, code, values=(target, value)):
        resolve(target)


@pytest.mark.parametrize("target", [None, 3, ["os.system"], {"a": 1}])
def test_a_target_is_text(target: object) -> None:
    with raises(ConfigError, "invalid_target", values=("_target_",)):
        resolve(target)


def test_a_hostile_target_is_not_even_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as error:
        resolve("evil_module.thing")
    assert "evil_module" not in sys.modules
    assert error.value.fix == "--trust-package evil_module   (if you trust its code)"


def test_trust_opens_one_package_and_not_what_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import os\nfrom os import system\nfrom functools import partial\n"
    text += "def made():\n    return 1\nlist_made = partial(made)\n"
    (tmp_path / "half_trusted.py").write_text(text)
    (tmp_path / "half_trusted_too.py").write_text("def made():\n    return 2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert resolve("half_trusted.made", ["half_trusted"])() == 1
    for alias in ("os.system", "system", "partial", "list_made", "os", "made.__globals__", "nothing"):
        with pytest.raises(ConfigError):
            resolve(f"half_trusted.{alias}", ["half_trusted"])
    with pytest.raises(ConfigError):
        resolve("half_trusted_too.made", ["half_trusted"])


def test_a_trusted_module_that_cannot_be_imported_is_told_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_at_import.py").write_text("numbers = []\nfirst = numbers[0]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    place = f"{tmp_path / 'broken_at_import.py'}:2"
    with raises(ConfigError, "import_failed", values=("broken_at_import.Reward", place, "IndexError")):
        resolve("broken_at_import.Reward", ("broken_at_import",))


def test_allowed_targets() -> None:
    from automodel_cli.distributed.mesh_config import MeshConfig

    assert resolve("automodel_cli.distributed.mesh_config.MeshConfig") is MeshConfig
    import torch

    assert resolve("torch.optim.AdamW") is torch.optim.AdamW
    assert resolve("torch.distributed.fsdp.MixedPrecisionPolicy") is torch.distributed.fsdp.MixedPrecisionPolicy


def test_near_misses_are_named() -> None:
    cases = {
        "recipe.sft.SFTRecipe": "_target_=automodel_cli.recipes.sft.SFTRecipe",
        "recipes.finetune.SFTRecipe": "_target_=automodel_cli.recipes.sft.SFTRecipe",
        "recipes.objectives.SFT": "_target_=automodel_cli.objectives.sft.SFT",
        "torch.optim.AdanW": "_target_=torch.optim.AdamW",
        "automodel_cli.distributed.mesh_config.MeshKonfig": "_target_=automodel_cli.distributed.mesh_config.MeshConfig",
    }
    for given, fix in cases.items():
        with pytest.raises(ConfigError) as error:
            resolve(given)
        assert error.value.fix == fix


def test_a_node_that_was_moved_is_named_where_it_is() -> None:
    """By the name of its class in any file of ours; of two with one name, the one whose path is nearer."""
    calculator = "automodel_cli.rollout.environments.calculator.Calculator"
    cases = {
        "automodel_cli.rollout.calculator.Calculator": calculator,
        "automodel_cli.rollout.enviroments.calculator.Calculator": calculator,
        "automodel_cli.rollout.engines.base.VLLMConfig": "automodel_cli.rollout.engines.config.VLLMConfig",
    }
    for old, new in cases.items():
        with raises(ConfigError, "invalid_target", values=(old,), fix=f"_target_={new}"):
            resolve(old)
        assert is_node(resolve(new))
    for nowhere in ("automodel_cli.rollout.calculator.Abacus", "automodel_cli.rollout.meter.Meter"):  # no node has it
        with raises(ConfigError, "invalid_target", values=(nowhere,)) as error:
            resolve(nowhere)
        assert error.value.fix is None
