"""The language of `fix`: text that works when pasted, or words that are marked as such.

A fix has one or several alternatives, separated by ", or ". The first one comes from this package. A space and a
parenthesis begin a note. An alternative is *overrides* (`mesh.pp_size=2 pipeline=1f1b`), a *command* (`pip install x`,
`-c quickstart`) or *words* ("start the server"). If the first alternative is words, the label is `try` instead of
`fix`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

Kind = Literal["overrides", "command", "words"]

_COMMANDS = (
    *("automodel", "pip", "export", "mv", "cp", "chmod", "for", "transformers", "vllm", "docker", "nvidia-smi", "uv"),
    *("ulimit", "unset", "wandb", "hf", "python", "iconv", "gunzip", "gzip", "zstd"),
)
_SHELL_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")
_KEY = re.compile(r"^('?~?)([A-Za-z_][\w.]*)(?==|$)")
_PLAIN = re.compile(r"[\w./*?:+-]+")
_SPELLABLE = re.compile(r"(?!(?:null|true|false|nan|inf)$)[a-z_][\w ./*|()\[\]{}:=,+$-]*", re.A | re.I)  # keys of dicts
_ESCAPED = re.compile(r"[()\[\]{}:=,]")
_OVERRIDE = re.compile(r"~[A-Za-z_][\w.]*|~?[A-Za-z_][\w.]*=\S.*", re.S)


def word(value: object) -> str:
    """Return `value` (a path, a run, an address) as one word of a shell.

    Text with single quotes is put between double quotes if a shell expands nothing in it, since `shlex.quote`
    writes each as `'"'"'`.
    """
    text = str(value)
    return f'"{text}"' if "'" in text and not re.search(r'["$`\\!]', text) else shlex.quote(text)


def override(key: str, value: str) -> str:
    """Return `key=value` quoted for a shell and for the grammar of overrides."""
    if all(character.isalnum() or character in "._/+-" for character in value):
        return f"{key}={value}"
    return word(f"{key}={_quoted(value)}")


def list_override(key: str, values: Iterable[str]) -> str:
    """Return `key=[...]` quoted for a shell and for the grammar of overrides."""
    return word(f"{key}=[{','.join(map(_plain, values))}]")


def mapping_override(key: str, entries: Mapping[str, str | float]) -> str | None:
    """Return overrides that replace the mapping of `key`, quoted for a shell and for the grammar of overrides.

    An override of a mapping merges, so the first one clears it: `key={} 'key={a: 1, b: 2}'`. None if the grammar has no
    spelling for a name.
    """
    if not entries:
        return f"{key}={{}}"
    if not all(_SPELLABLE.fullmatch(name) for name in entries):
        return None
    names = (_ESCAPED.sub(lambda found: f"\\{found[0]}", name) for name in entries)
    pairs = ", ".join(f"{name}: {_plain(value)}" for name, value in zip(names, entries.values(), strict=True))
    return f"{key}={{}} " + word(f"{key}={{{pairs}}}")


def _plain(value: str | float) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else _quoted(value)
    return repr(int(value) if value == int(value) else value)


def _quoted(value: str) -> str:
    # Hydra reads a backslash as one unless a quote follows, perhaps behind further ones.
    escaped = re.sub(r'(\\*)("|$)', lambda match: match[1] * 2 + match[2].replace('"', '\\"'), value)
    return f'"{escaped}"'


def alternatives(fix: str) -> list[str]:
    """The alternatives without their notes."""
    return [re.split(r" +\(| {3}(?=\w)", text, maxsplit=1)[0].strip() for text in fix.split(", or ")]


def shell_words(text: str) -> list[str]:
    """Split one alternative like a shell. Returns the complete text if its quotes do not match."""
    try:
        return shlex.split(text)
    except ValueError:
        return [text]


def kind(text: str) -> Kind:
    """Classify one alternative. A placeholder (`<path>`, `...`) makes it words."""
    words = shell_words(text)
    if not words:
        return "words"
    if words[0] in _COMMANDS or re.fullmatch(r"-c|--[a-z-]+(=\S+)?", words[0]):
        return "command"
    pasteable = all(_OVERRIDE.fullmatch(word) for word in words) and not re.search(r"<[^>]*>|\.\.\.|VALUE$", text)
    return "overrides" if pasteable else "words"


def label(fix: str) -> str:
    """Return `fix` for text that can be pasted and `try` for advice."""
    return "try" if kind(alternatives(fix)[0]) == "words" else "fix"


def map_keys(fix: str, place: Callable[[str], str]) -> str:
    """Replace the key of every override in the fix by `place(key)`. Words and commands stay unchanged."""
    return ", or ".join(_mapped(text, place) for text in fix.split(", or "))


def _mapped(text: str, place: Callable[[str], str]) -> str:
    if kind(alternatives(text)[0]) != "overrides":
        return text
    return _SHELL_WORD.sub(lambda word: _KEY.sub(lambda key: key[1] + place(key[2]), word[0], count=1), text)
