"""`automodel options` and the pages of docs/config: every key has a sentence, and the pages are what the code says."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from automodel_cli.cli import completion_values
from automodel_cli.cli.main import run
from automodel_cli.config import schema
from automodel_cli.config.composition import bundled_recipes
from automodel_cli.config.keys import reference as key_reference
from automodel_cli.config.keys.reference_pages import COMMON, groups, pages
from automodel_cli.data.data_sources import DatasetGenerator
from automodel_cli.models.tokenizer import TokenizerNode
from automodel_cli.rollout.engines.base import EngineConfig
from automodel_cli.rollout.environments.base import EnvironmentNode
from automodel_cli.rollout.rewards.base import RewardFunction
from automodel_cli.training.config import ValidationTask
from automodel_cli.training.trackers import TrackerNode
from tests.errors import assert_error
from tests.unit.cli.test_main import check_quick

NODES = key_reference.nodes()


@pytest.mark.parametrize("node", NODES, ids=lambda node: f"{node.path}:{node.target.rpartition('.')[2]}")
def test_every_key_has_a_sentence_of_its_own(node: key_reference.ReferenceNode) -> None:
    """The docstring below the field, and no two keys of a node share one."""
    texts = {key.name: key.text for key in node.keys}
    assert [name for name, text in texts.items() if not text] == [], f"write a docstring below the field: {node.target}"
    assert len(set(texts.values())) == len(texts)


@dataclass(frozen=True)
class _Node:
    """A text about speed: sentences of a class docstring, as `speed` and depth, belong to no key.

    depth: nor does this one.
    """

    speed: float = 1.0
    depth: int = 2
    """Layers."""


class _Inherits(_Node):
    """A subclass keeps the sentences of its base."""


def test_only_the_docstring_below_a_field_is_its_sentence() -> None:
    assert key_reference.sentences(_Node) == {"speed": "", "depth": "Layers."}
    assert key_reference.sentences(_Inherits) == {"speed": "", "depth": "Layers."}


def test_keys_of_different_fields_do_not_share_a_sentence() -> None:
    """A sentence of several keys is that of one field, seen in several nodes, or of fields with one meaning."""
    by_text: dict[str, set[str]] = {}
    for node in NODES:
        for key in node.keys:
            by_text.setdefault(key.text, set()).add(key.name.rpartition(".")[2])
    assert {text: names for text, names in by_text.items() if len(names) > 1} == {}


def test_a_sentence_is_a_sentence() -> None:
    wrong = [
        key.name for node in NODES for key in node.keys if not key.text.endswith((".", ".)")) or len(key.text) > 330
    ]
    assert wrong == []


OPEN_PROTOCOLS: list[tuple[str, type, str]] = [
    ("rewards.NAME", RewardFunction, "automodel_cli.rollout.rewards"),
    ("rollout.environment", EnvironmentNode, "automodel_cli.rollout.environments"),
    ("data.generator", DatasetGenerator, "automodel_cli.data"),
    ("data.generator", DatasetGenerator, "automodel_cli.rollout"),
    ("rollout.engine", EngineConfig, "automodel_cli.rollout"),
    ("model.tokenizer", TokenizerNode, "automodel_cli.models"),
    ("logging.trackers", TrackerNode, "automodel_cli.training.trackers"),
    ("validation.tasks.NAME", ValidationTask, "automodel_cli.evaluation.config"),
]


def _modules(package: str) -> Iterator[ModuleType]:
    """A package, or a module, and all that is below it; without those of extras that are not installed."""
    root = importlib.import_module(package)
    yield root
    for module in pkgutil.walk_packages(getattr(root, "__path__", ()), f"{package}."):
        with contextlib.suppress(ModuleNotFoundError):
            yield importlib.import_module(module.name)


@pytest.mark.parametrize(
    ("path", "protocol", "package"), OPEN_PROTOCOLS, ids=lambda value: getattr(value, "__name__", value)
)
def test_every_node_of_ours_is_listed(path: str, protocol: type, package: str) -> None:
    """Each concrete config node of the package that the annotation of the key allows."""
    names = schema.protocol_members(protocol)[protocol]
    listed = {node.target for node in NODES if node.path == path}
    found = set()
    for module in _modules(package):
        for cls in vars(module).values():
            is_node = isinstance(cls, type) and dataclasses.is_dataclass(cls) and cls.__module__ == module.__name__
            if is_node and not schema.missing_members(cls, names) and not cls.__subclasses__():
                found.add(f"{cls.__module__}.{cls.__qualname__}")
    assert found
    assert found - listed == set()


def test_the_pages_are_what_the_code_says(tmp_path: Path) -> None:
    docs = Path(__file__).parents[3] / "docs"
    run(["options", "--markdown", str(tmp_path)])
    made = {str(path.relative_to(tmp_path)): path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.md")}
    kept = {str(path.relative_to(docs)): path for path in [docs / "config.md", *(docs / "config").glob("*.md")]}
    assert sorted(made) == sorted(kept)
    for name, path in kept.items():
        assert path.read_text(encoding="utf-8") == made[name], "automodel options --markdown docs"


def test_each_key_stands_once_on_the_page_of_its_section() -> None:
    made = pages(NODES)
    for node in NODES[1:]:
        page = made[f"config/{node.path.partition('.')[0]}.md"]
        part = page.partition(f"## `{node.path}`: {node.target.rpartition('.')[2]}\n")[2].partition("\n## ")[0]
        assert part, node.target
        assert re.findall(r"</a>`([\w.]+)` \|", part) == [key.name for keys in groups(node).values() for key in keys]
        assert sorted(key.name for keys in groups(node).values() for key in keys) == sorted(k.name for k in node.keys)


def test_each_engine_is_selected_by_its_option() -> None:
    page = pages(NODES)["config/rollout.md"]
    options = [f"Select it with `rollout={name}`." for name in ("sampler", "hf", "vllm", "sglang")]
    assert [page.count(option) for option in options] == [1, 1, 1, 1]


def test_the_anchors_of_a_page_differ() -> None:
    for name, page in pages(NODES).items():
        anchors = re.findall(r'<a id="([^"]+)"', page)
        assert len(set(anchors)) == len(anchors), name


def test_common_keys_exist_and_have_a_default() -> None:
    optional = {key.name for node in NODES for key in node.keys if key.default}
    assert COMMON - optional == set()


def test_a_key_without_a_default_is_required() -> None:
    train = next(node for node in NODES if node.path == "train")
    assert [key.name for key in groups(train)["Required"]] == ["train.global_batch_size"]


def test_no_key_is_missing() -> None:
    """Against the shell completion, which walks the annotations of each bundled config by itself."""
    names = {key.name for node in NODES for key in node.keys}
    free = (
        "model.config",
        "rewards.",
        "data.generator.",
        "model.tokenizer.",
        "parallelizer.mp_policy.",
        "rollout.environment.",
    )
    for name in ("sft", "pretrain", "dpo", "rm", "kd", "grpo"):
        found = {key for key in completion_values.keys(name) if not key.startswith(free)}
        assert found - {"pipeline.pipeline"} <= names  # from conf/pipeline/none.yaml, which is packed globally


def test_every_option_of_a_group_is_named_with_its_node() -> None:
    options = {(node.path, option) for node in NODES for option in node.options}
    for file in bundled_recipes.conf_dir().glob("*/*.yaml"):
        tree = yaml.safe_load(file.read_text())
        if isinstance(tree, dict) and "_target_" in tree and file.parent.name != "eval":  # roots, no options
            assert (file.parent.name, file.stem) in options


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("optimizer", ["optimizer.lr (required)   a number", "optimizer=adamw", "optimizer=muon"]),
        ("megatron_fsdp", ["parallelizer.zero_dp_strategy"]),
        ("seq_len", ["data.seq_len = 2048   a whole number"]),
        ("model.lora", ["model.lora.quantization = none   none or nf4"]),
    ],
)
def test_a_part_can_be_asked_for(section: str, expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["options", section]) == 0
    said = capsys.readouterr().out
    assert [text for text in expected if text not in said] == []


def test_a_misspelt_section_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["options", "optimiser"]) == 2
    assert_error(capsys.readouterr().err, "unknown_name", "optimiser", fix="fix   automodel options optimizer")


@pytest.mark.slow
def test_it_is_quick_and_torch_free(tmp_path: Path) -> None:
    check_quick(
        tmp_path, 1.4, "torch,numpy,rich,transformers,hydra", "options"
    )  # it imports the config of every component
