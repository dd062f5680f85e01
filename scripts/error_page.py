"""Print docs/errors.md: every sentence with which a config, a data set or a run is refused, from the code itself."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from automodel_cli.config.fixes import label

ROOT = Path(__file__).parents[1]
_KINDS = {"ConfigError": 2, "DataError": 3, "RunError": 1, "DryRunError": 1}
_SECTIONS = (
    *("model", "data", "objective", "optimizer", "lr_scheduler", "parallelizer", "mesh", "pipeline", "train"),
    *("validation", "checkpoint", "logging", "callbacks", "reference", "teacher", "rollout", "rewards", "output_dir"),
)
_AREAS = {
    "cli": "Commands",
    "config": "Files, overrides and `_target_`",
    "data": "Rows and files of data",
    "evaluation": "Evaluations",
    "launch": "Starting processes and jobs",
    "models": "Models",
    "pipelining": "Pipelines",
    "rollout": "Samples, servers and rewards",
}
_OTHERS = "Runs"
_INTRO = """\
# Every error

Made by `python scripts/error_page.py` from the code; a test compares. Search this page for words of the sentence that
you got. `<name>` stands for a value, `…` for what is computed.

What is refused is said before anything is built, in one shape: the value and the rule, where the value came from
(`from`), and what to do (`fix` can be pasted behind the command; `try` is advice). All errors of a config come at once.
`automodel check -c CONF` says them without a GPU. The number in front is the exit code: 2 usage or config, 3 data,
1 the run.

What happens when memory, disks, ranks or servers fail: [When something breaks](reliability.md).
"""


@dataclass(frozen=True)
class Sentence:
    """One place that refuses: under which heading, its exit code, its text and what it offers."""

    heading: str
    exit_code: int
    text: str
    fix: str


def sentences() -> Iterator[Sentence]:
    for path in sorted((*(ROOT / "automodel_cli").rglob("*.py"), *(ROOT / "recipes").glob("*.py"))):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        parts = path.relative_to(ROOT).parts
        area = _AREAS.get(parts[1] if len(parts) > 2 else "", _OTHERS)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _KINDS and node.args:
                text = _text(node.args[0])
                if len(re.sub(r"<\w+>|…|\W", "", text)) > 10:  # what passes on another's words says nothing here
                    named = {word.arg: word.value for word in node.keywords}
                    yield Sentence(
                        _heading(named.get("keys"), area), _KINDS[node.func.id], text, _text(named.get("fix"))
                    )


def _heading(keys: ast.expr | None, area: str) -> str:
    names = [_text(e) for e in keys.elts] if isinstance(keys, ast.Tuple) else []
    section = names[0].partition(".")[0] if names else ""
    return f"`{section}`" if section in _SECTIONS else area


def _text(node: ast.expr | None) -> str:
    """A string as it is written, with `<name>` for what is put in by name and `…` for all else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    if isinstance(node, ast.FormattedValue):
        inner = node.value
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "word":
            inner = inner.args[0]  # quoted for a shell
        if isinstance(inner, ast.Name):
            return f"<{inner.id.strip('_')}>"
        if isinstance(inner, ast.Attribute):
            return f"<{inner.attr.strip('_')}>"
        return "…"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "override":
        return f"{_text(node.args[0])}=…"
    return "" if node is None or isinstance(node, ast.Constant) else "…"


def page() -> str:
    by_heading: dict[str, dict[tuple[int, str], str]] = defaultdict(dict)
    for found in sentences():
        by_heading[found.heading].setdefault((found.exit_code, found.text), found.fix)
    parts = [_INTRO]
    order = [f"`{name}`" for name in _SECTIONS] + list(_AREAS.values()) + [_OTHERS]
    for heading in sorted(by_heading, key=order.index):
        parts.append(f"## {heading}\n")
        for (code, text), fix in sorted(by_heading[heading].items(), key=lambda entry: entry[0][1].lower()):
            more = f"  \n  {_label(fix)} {_code(fix)}" if fix.strip("…") else ""
            parts.append(f"- {code} {_code(text)}{more}")
        parts.append("")
    return "\n".join(parts)


def _label(fix: str) -> str:
    """What the error says before it, once values stand in it."""
    return label(re.sub(r"<\w+>|…", "1", fix))


def _code(text: str) -> str:
    """A code span in one line."""
    text = " ".join(text.split())
    return f"`` {text} ``" if "`" in text else f"`{text}`"


if __name__ == "__main__":
    print(page(), end="")
