"""Size limits of configs. Files that refer to themselves, nest too deeply or expand too far are rejected before any
other code reads them.

YAML's aliases and OmegaConf's interpolations expand a few lines to exponentially large trees. Sizes are computed from
the text in one pass, without building the tree. Real configs are a thousand times smaller.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import yaml

from automodel_cli.config.composition.bundled_recipes import display
from automodel_cli.config.dotted_keys import join, value_at
from automodel_cli.config.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_DEPTH = 40
MAX_NODES = 20_000
MAX_FILES = 3_000
MAX_CHARACTERS = 1 << 20
_PARSER: object = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # missing if PyYAML was built without libyaml
_WORD = re.compile(r"[\w.\-\[\]]+")
_OPEN, _CLOSE = "[{(", "]})"
_NO_VALUE = object()


@dataclass
class _Open:
    """A section whose end has not come: its anchor, and the nodes that it holds so far, aliases counted in full."""

    anchor: str | None
    num_nodes: int = 1


def check_file(path: Path) -> None:
    """Raise ConfigError for a YAML file that is no text, or too large, too deep or endless. Other faults are left to
    the parser.
    """
    if (size := os.stat(path).st_size) > MAX_BYTES:
        raise _refused("limit_exceeded", path, 1, f"has {size:,} bytes. The limit is {MAX_BYTES:,}")
    try:
        text = path.read_bytes().decode()
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        fix = f"iconv -f latin1 -t utf-8 {path} -o {path.stem}_utf8.yaml"
        raise _refused("invalid_yaml", path, line, "is not UTF-8 text", fix) from None
    # libyaml stops at 1,000 nested flow levels, before its first event. Then the Python parser, which has no such
    # limit, reads up to the level that is rejected here.
    for parser in dict.fromkeys((_PARSER, yaml.SafeLoader)):
        try:
            return _count(path, text, parser)
        except yaml.MarkedYAMLError:
            continue
        except yaml.reader.ReaderError as error:
            line = text[: error.position].count("\n") + 1
            what = f"contains a character that YAML does not allow: {chr(int(error.character))!r}"
            raise _refused("invalid_yaml", path, line, what) from None


def _count(path: Path, text: str, parser: object) -> None:
    """Walk the events of the parser, which neither recurses nor expands anything."""
    sizes: dict[str, int] = {}
    stack = [_Open(None)]
    for event in yaml.parse(text, Loader=parser):
        line = event.start_mark.line + 1 if event.start_mark else 1
        match event:
            case yaml.CollectionStartEvent():
                stack.append(_Open(event.anchor))
                if len(stack) > MAX_DEPTH:
                    raise _refused("limit_exceeded", path, line, f"nests more than {MAX_DEPTH} levels")
            case yaml.CollectionEndEvent():
                closed = stack.pop()
                stack[-1].num_nodes += closed.num_nodes
                if closed.anchor is not None:
                    sizes[closed.anchor] = closed.num_nodes
            case yaml.AliasEvent(anchor=anchor):
                if any(section.anchor == anchor for section in stack):
                    what = f"is circular: *{anchor} is inside &{anchor}"
                    raise _refused("invalid_yaml", path, line, what)
                stack[-1].num_nodes += sizes.get(anchor, 1)
            case yaml.ScalarEvent(anchor=anchor):
                stack[-1].num_nodes += 1
                if anchor is not None:
                    sizes[anchor] = 1
        if sum(section.num_nodes for section in stack) > MAX_NODES:
            what = f"contains more than {MAX_NODES:,} values, counted with aliases (*name) expanded"
            raise _refused("limit_exceeded", path, line, what)


def check_num_files(number: int, name: str) -> None:
    """Raise ConfigError if the defaults lists include too many files. A file counts each time it is named."""
    if number > MAX_FILES:
        raise ConfigError(
            f"the defaults lists include more than {MAX_FILES:,} files",
            code="limit_exceeded",
            keys=("defaults",),
            origin=f"defaults, the last of them {name}",
        )


def check_override(text: str) -> None:
    """Raise ConfigError for a command-line value that is too long or nests too deep for the grammar's parser."""
    depth = deepest = 0
    for character in text:
        depth += (character in _OPEN) - (character in _CLOSE)
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH or len(text) > MAX_BYTES:
        what = f"nests {deepest} levels" if deepest > MAX_DEPTH else f"has {len(text):,} characters"
        fix = "write the value in a file"
        raise ConfigError(f"{text[:24]}... {what}", code="limit_exceeded", origin="command line", fix=fix)


def too_large(raw: dict[str, object]) -> str | None:
    """Return the first key whose interpolations expand to more than MAX_CHARACTERS or nest deeper than MAX_DEPTH. None
    if there is none.

    Every word of a text with `${` in it that is the name of a key counts as a reference: never too few.
    """
    sizes: dict[str, int] = {}

    def size(value: object, key: str, depth: int) -> int:
        if depth > MAX_DEPTH:
            return MAX_CHARACTERS + 1
        text = ""
        match value:
            case dict():
                return sum(of_key(join(key, str(name)), item, depth) for name, item in value.items())
            case list():
                return sum(of_key(join(key, str(i)), item, depth) for i, item in enumerate(value))
            case str():
                text = value
        total = 1 + len(text)
        for word in _WORD.findall(text) if "${" in text else ():
            name = _absolute(word, key)
            if name != key and (target := value_at(raw, name, _NO_VALUE)) is not _NO_VALUE:
                total += of_key(name, target, depth + 1)
        return total

    def of_key(key: str, value: object, depth: int) -> int:
        if key not in sizes:
            sizes[key] = 0  # a circle, which the resolution itself names
            sizes[key] = min(size(value, key, depth), MAX_CHARACTERS + 1)
        return sizes[key]

    return next((name for name, value in raw.items() if of_key(str(name), value, 0) > MAX_CHARACTERS), None)


def _absolute(word: str, key: str) -> str:
    """`..b[0]` as seen from `a.c.d` is `a.b.0`."""
    name = word.replace("[", ".").replace("]", "")
    rest = name.lstrip(".")
    dots = len(name) - len(rest)
    parents = key.split(".")[:-dots] if dots else []
    return ".".join([*parents, *rest.split(".")])


def _refused(code: str, path: Path, line: int, what: str, fix: str | None = None) -> ConfigError:
    return ConfigError(f"{display(path)} {what}", code=code, origin=f"{display(path)}:{line}", fix=fix)
