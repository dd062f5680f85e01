"""Reference of all config keys: type, default, choices and description, read from the nodes. Imports no torch.

The sentence of a key is the docstring right below its field. A field that a class redefines without one has its base's.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from automodel_cli.config import scalar_conversion, schema
from automodel_cli.config.composition import bundled_recipes
from automodel_cli.config.diagnostics import format_value
from automodel_cli.config.security import targets

RECIPES = (
    "automodel_cli.recipes.sft.SFTRecipe",
    "automodel_cli.recipes.pretrain.PretrainRecipe",
    "automodel_cli.recipes.dpo.DPORecipe",
    "automodel_cli.recipes.rm.RMRecipe",
    "automodel_cli.recipes.classifier.ClassifierRecipe",
    "automodel_cli.recipes.embedding.EmbeddingRecipe",
    "automodel_cli.recipes.kd.KDRecipe",
    "automodel_cli.recipes.grpo.GRPORecipe",
)
_OPEN = {
    "objective": ("automodel_cli.objectives.sft.SFT",),
    "data.generator": (
        "automodel_cli.data.synthetic.chat_tasks.ChatTasks",
        "automodel_cli.data.synthetic.preference_tasks.PreferenceTasks",
        "automodel_cli.data.synthetic.picture_tasks.PictureTasks",
        "automodel_cli.data.synthetic.python_manual.PythonManual",
        "automodel_cli.data.synthetic.review_tasks.ReviewTasks",
        "automodel_cli.data.synthetic.search_tasks.SearchTasks",
        "automodel_cli.rollout.rewards.reasoning.ReasoningTasks",
        "automodel_cli.rollout.environments.verifiers.VerifiersTasks",
    ),
    "model.tokenizer": (
        "automodel_cli.models.tokenizer.ByteTokenizer",
        "automodel_cli.models.tokenizer.PretrainedTokenizer",
        "automodel_cli.models.vision.nodes.WordTokenizer",
    ),
    "model.vision.processor": (
        "automodel_cli.models.vision.nodes.QwenProcessor",
        "automodel_cli.models.vision.nodes.GemmaProcessor",
    ),
    "logging.trackers": tuple(
        f"automodel_cli.training.trackers.{name}" for name in ("TensorBoard", "WandB", "MLflow", "Trackio")
    ),
    "rollout.engine": (
        *(f"automodel_cli.rollout.engines.config.{name}" for name in ("SamplerConfig", "HFConfig", "VLLMConfig")),
        "automodel_cli.rollout.engines.servers.sglang_config.SGLangConfig",
    ),
    "rollout.advantage_estimator": ("automodel_cli.rollout.advantages.base.FunctionEstimator",),
    "validation.tasks": (
        "automodel_cli.evaluation.config.Generation",
        "automodel_cli.evaluation.config.MultipleChoice",
    ),
    "rollout.environment": (
        "automodel_cli.rollout.environments.calculator.Calculator",
        *(
            f"automodel_cli.rollout.environments.{name}"
            for name in (
                *("functions.FunctionTools", "python_tool.PythonTool", "mcp.MCPTools"),
                "verifiers.VerifiersEnvironment",
            )
        ),
    ),
    "rewards": tuple(
        f"automodel_cli.rollout.rewards.{name}"
        for name in (
            *("text.ExactAnswer", "text.FormatRegex", "text.Length", "text.FunctionReward"),
            *("math.MathEquivalence", "code.CodeExecution", "reasoning.ReasoningReward", "reward_model.RewardModel"),
            *("remote.ScoreServer", "remote.ModelJudge"),
        )
    ),
}
"""Bundled nodes for keys that accept any node of a kind. Groups of conf/ add theirs."""

_GROUPS = ("objective", "optimizer", "lr_scheduler", "parallelizer", "pipeline")
"""Groups of conf/ whose files name nodes."""

_ELEMENT = {"rewards": "NAME", "validation.tasks": "NAME", "data.datasets": "0"}
"""Keys that hold several nodes: by names of the user's, or as a list, whose first one is shown."""


@dataclass(frozen=True)
class Key:
    """One key: its full name, its type in words, its default as YAML ("" if required)."""

    name: str
    kind: str
    default: str
    text: str


@dataclass(frozen=True)
class ReferenceNode:
    """The keys of one class at one place. `options`: names that choose it on the command line, as `section=option`."""

    path: str
    target: str
    options: tuple[str, ...]
    summary: str
    keys: tuple[Key, ...]


def nodes() -> list[ReferenceNode]:
    """Return every node of every recipe, in the order of the recipe's fields. Shared nodes occur once."""
    by_key: dict[tuple[str, str], ReferenceNode] = {}
    walked: list[tuple[str, object]] = []
    root: dict[str, schema.Parameter] = {}
    texts: dict[str, str] = {}
    for path in RECIPES:
        target = targets.resolve(path)
        for name, parameter in schema.signature(target).parameters.items():
            if name not in root or root[name].default is schema.REQUIRED:  # required: in every recipe that has it
                root[name] = parameter
        texts |= {name: text for name, text in sentences(target).items() if text}
        for name, parameter in schema.signature(target).parameters.items():
            if (name, parameter.hint) in walked:
                continue
            walked.append((name, parameter.hint))
            for node in _below(name, parameter.hint):
                by_key.setdefault((node.path, node.target), node)
    keys = tuple(_key(name, parameter, texts.get(name, "")) for name, parameter in root.items())
    return [ReferenceNode("", "recipes", (), "The sections of a config.", keys), *by_key.values()]


def _below(path: str, hint: object) -> Iterator[ReferenceNode]:
    inner: dict[type, tuple[str, ...]] = dict.fromkeys(_dataclasses(hint), ())
    for target, options in _choices(path):
        inner[target] = options
    for target, options in inner.items():
        place = f"{path}.{_ELEMENT[path]}" if path in _ELEMENT else path
        parameters = schema.signature(target).parameters
        texts = sentences(target)
        name = f"{target.__module__}.{target.__qualname__}"
        keys = tuple(_key(f"{place}.{k}", p, texts[k]) for k, p in parameters.items())
        summary = _paragraphs(inspect.getdoc(target) or "")[0]
        yield ReferenceNode(place, name, options, summary, keys)
        if path == "validation.tasks":
            continue  # the sections below are `data` and `rewards` again
        for k, p in parameters.items():
            yield from _below(f"{place}.{k}", p.hint)


def _dataclasses(hint: object) -> list[type]:
    """Return the config nodes that an annotation allows, also in lists or by name."""
    members = schema.dataclass_members(hint)
    for member in schema.members(hint):
        members += [cls for argument in typing.get_args(member) for cls in _dataclasses(argument)]
    return members


def _choices(path: str) -> list[tuple[type, tuple[str, ...]]]:
    """Return the nodes in the files of a group with their options, and those of `_OPEN`."""
    import yaml

    named: dict[str, list[str]] = {name: [] for name in _OPEN.get(path, ())}
    for file in sorted((bundled_recipes.conf_dir() / path).glob("*.yaml")) if path in _GROUPS else ():
        tree = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
        node = tree if "_target_" in tree else tree.get(path)  # below its path if it also sets another section
        match node:
            case {"_target_": target}:
                named.setdefault(target, []).append(file.stem)
    return [(targets.resolve(name), tuple(options)) for name, options in named.items()]  # type: ignore[misc]


def node_for(key: str, given: dict[str, object]) -> str | None:
    """Return the first bundled node at `key`, or at the list or named nodes above it, that has all of `given`."""
    for path in (key, key.rpartition(".")[0]):
        for target, _ in _choices(path):
            if given.keys() <= schema.signature(target).parameters.keys():
                return f"{target.__module__}.{target.__qualname__}"
    return None


def option_of(section: str, target: str) -> str | None:
    """Return the first option of the group `section` that names the node `target`."""
    options = {f"{node.__module__}.{node.__qualname__}": names for node, names in _choices(section)}
    return next(iter(options.get(target, ())), None)


def _key(name: str, parameter: schema.Parameter, text: str) -> Key:
    default = parameter.default() if parameter.is_factory else parameter.default
    if default is schema.REQUIRED:
        shown = ""
    elif targets.is_node(type(default)):
        shown = f"{type(default).__name__}()"
    else:
        shown = format_value(default, 60)
    kind = (
        "any node" if parameter.hint is Any else scalar_conversion.describe_alternatives(schema.members(parameter.hint))
    )
    return Key(name, kind, shown, text)


@functools.cache
def sentences(target: Callable[..., object]) -> dict[str, str]:
    """Return the docstring below each field, or "" without one."""
    docstrings = dict.fromkeys(schema.signature(target).parameters, "")
    for cls in inspect.getmro(target)[:-1] if isinstance(target, type) else ():
        below = _below_fields(cls.__module__).get(cls.__name__, {})
        docstrings = {name: text or below.get(name, "") for name, text in docstrings.items()}
    return docstrings


@functools.cache
def _below_fields(module: str) -> dict[str, dict[str, str]]:
    """Return the field docstrings of each class of a module."""
    file = getattr(sys.modules[module], "__file__", None)
    if file is None:
        return {}
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return {node.name: dict(_texts(node)) for node in tree.body if isinstance(node, ast.ClassDef)}


def _texts(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    for pair in itertools.pairwise(node.body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())


def _paragraphs(doc: str) -> list[str]:
    return [" ".join(text.split()) for text in doc.split("\n\n")]
