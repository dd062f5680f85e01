"""Line numbers of the keys of a YAML file, and values whose spelling YAML and the command line interpret differently.

The loader must be OmegaConf's, which Hydra reads files with: PyYAML's own one calls `1e-5` a string.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from omegaconf._utils import get_yaml_loader  # the one private name: it is the loader that Hydra uses

from automodel_cli.config.composition.bundled_recipes import display
from automodel_cli.config.composition.yaml_limits import check_file
from automodel_cli.config.dotted_keys import join
from automodel_cli.config.errors import ConfigError

_BOOL_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+$")
_BASE_PREFIX = re.compile(r"[-+]?0(x[0-9a-fA-F_]+|b[01_]+)$")
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?$")


@dataclass(frozen=True)
class Mark:
    """One key of a file: its dotted path, its line (from 1), and the problem of its value's spelling, if any."""

    key: str
    line: int
    refused: str | None = None
    fix: str | None = None


def _refusal(text: str) -> tuple[str, str] | None:
    """Return (reason, correction) for a plain scalar that YAML 1.1 silently converts to another value."""
    if text.lower() in _BOOL_WORDS:
        return f"{text} is ambiguous: a boolean in a file, text on the command line", _BOOL_WORDS[text.lower()]
    if _LEADING_ZERO.match(text):
        if set(text) <= set("01234567+-_"):
            return f"{text} is ambiguous: an octal number in a file ({int(text.replace('_', ''), 8)})", text.lstrip(
                "+-0_"
            ) or "0"
        return None
    if _BASE_PREFIX.match(text):
        value = int(text.replace("_", ""), 0)
        return f"{text} is ambiguous: {value} in a file, text on the command line", str(value)
    if _SEXAGESIMAL.match(text):
        return f"{text} is ambiguous: a number in base 60 in a file", f'"{text}"'
    return None


def read_marks(path: Path) -> list[Mark]:
    """Return every key in document order. List items are `key.0`, `key.1`. Raises ConfigError for invalid YAML."""
    check_file(path)
    try:
        with path.open(encoding="utf-8") as stream:
            root = yaml.compose(stream, Loader=get_yaml_loader())
    except yaml.MarkedYAMLError as error:
        raise yaml_error(path, error) from error
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        message = f"{display(path)} is not a mapping of keys to values"
        raise ConfigError(message, code="invalid_yaml", origin=f"{display(path)}:1")
    for key_node, _ in root.value:
        if isinstance(key_node, yaml.ScalarNode) and "." in key_node.value:
            raise _dotted(key_node.value, f"{display(path)}:{key_node.start_mark.line + 1}")
    return list(_walk(root, ""))


def _dotted(key: str, where: str) -> ConfigError:
    """Report a key with a dot. OmegaConf would keep it next to the section that it looks like."""
    section, _, rest = key.partition(".")
    nested = f"{section}: {{{rest.replace('.', ': {')}: ...{'}' * (rest.count('.') + 1)}"
    return ConfigError(
        f"the key {key} contains a dot. In a file, write keys inside their section",
        code="invalid_yaml",
        keys=(key,),
        origin=where,
        fix=f"write {nested}",
    )


def yaml_error(path: Path, error: yaml.MarkedYAMLError) -> ConfigError:
    """Broken YAML (or a key written twice) as an error of ours, with the line."""
    mark = error.problem_mark or error.context_mark
    line = mark.line + 1 if mark else 1
    problem = (error.problem or "cannot be read").removeprefix("found ")
    message = f"{display(path)} is not valid YAML: {problem}"
    return ConfigError(message, code="invalid_yaml", origin=f"{display(path)}:{line}")


def _walk(node: yaml.Node, prefix: str) -> Iterator[Mark]:
    match node:
        case yaml.MappingNode():
            for key_node, value_node in node.value:
                if key_node.tag == "tag:yaml.org,2002:merge":  # `<<: *anchor`: the keys keep the line of the anchor
                    merged = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                    for item in merged:
                        yield from _walk(item, prefix)
                    continue
                key = join(prefix, key_node.value)
                if why := _refused_scalar(key_node):
                    yield Mark(key, key_node.start_mark.line + 1, f"the key {why[0]}", f'"{key_node.value}":')
                    continue
                yield _mark(key, value_node, key_node.start_mark.line + 1)
                yield from _walk(value_node, key)
        case yaml.SequenceNode():
            for i, item in enumerate(node.value):
                key = join(prefix, i)
                yield _mark(key, item, item.start_mark.line + 1)
                yield from _walk(item, key)


def _mark(key: str, node: yaml.Node, line: int) -> Mark:
    why = _refused_scalar(node)
    return Mark(key, line) if why is None else Mark(key, line, f"{key}: {why[0]}", f"{key}={why[1]}")


def _refused_scalar(node: yaml.Node) -> tuple[str, str] | None:
    return _refusal(node.value) if isinstance(node, yaml.ScalarNode) and node.style is None else None
