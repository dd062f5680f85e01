"""run.json, the record of a run. Its fields are a public interface.

    command     the command line that repeats the run
    recipe      kind of the recipe: sft, dpo, grpo
    num_steps   steps of the run
    about       label -> text: the lines of the header
    data        statistics of data preparation, and name and content hash of each dataset
    numbers     name -> final value as text; samples, if the run has held-out questions
    attempts    one entry for each start: began, ended (UTC), state, first_step, host, process, command, code,
                environment, error

Rank 0 writes it atomically.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from automodel_cli import __version__
from automodel_cli.config.composition import bundled_recipes
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.security.safe_files import read_regular, replace
from automodel_cli.data.storage.checksums import Checksum
from automodel_cli.runs import record_validation

if TYPE_CHECKING:
    from automodel_cli.config.composition.compose import Composed

FILE = "run.json"
State = Literal["running", "finished", "failed", "interrupted"]
_PACKAGE = Path(__file__).resolve().parents[1]


class RunRecord:
    """The record of one active run. With `folder` None (ranks other than 0) nothing is written."""

    def __init__(self, folder: Path | None, source: Composed):
        self._folder, self._content = folder, {} if folder is None else read_record(folder)
        self._attempt: dict[str, object] = {}
        if folder is None:
            return
        command = command_of(source)
        self._attempt = {
            "began": _now(),
            "ended": None,
            "state": "running",
            "host": socket.gethostname(),
            "process": os.getpid(),
            "command": command,
            "code": code_version(),
        }
        self._content.setdefault("command", command)
        self._content.setdefault("attempts", []).append(self._attempt)
        self._write()

    def describe(self, **entries: object) -> None:
        """Add entries to the record."""
        self._content |= entries
        self._write()

    def describe_attempt(self, **entries: object) -> None:
        """Add entries to this attempt."""
        self._attempt |= entries
        self._write()

    def end(self, state: State, error: BaseException | None = None) -> None:
        """Record the end of the attempt. A full disk does not hide the reason why the run ended."""
        self._attempt |= {"state": state, "ended": _now()}
        if error is not None:
            first = (str(error).splitlines() or [""])[0]
            heading = f"{type(error).__name__}:"
            if isinstance(error, ConfigError):
                heading, self._attempt["error_code"] = error.heading, error.code
            self._attempt["error"] = f"{heading} {first}"
        try:
            self._write()
        except OSError:
            if error is None:
                raise

    def _write(self) -> None:
        if self._folder is None:
            return
        replace(self._folder / FILE, json.dumps(self._content, indent=1) + "\n")


def read_record(folder: Path) -> dict[str, Any]:
    """Return the record in `folder` without entries of a wrong type. {} if there is no readable one."""
    try:
        return record_validation.record(json.loads(read_regular(folder / FILE)))
    except (OSError, ValueError, RecursionError):
        return {}


def command_of(source: Composed) -> str:
    """The command line that starts `source` again, to be pasted into a shell."""
    if source.run_dir is not None:
        words = ["automodel", "resume", str(source.run_dir)]
    else:
        is_bundled = source.path.parent == bundled_recipes.conf_dir()
        name = source.path.stem if is_bundled else bundled_recipes.display(source.path)
        words = ["automodel", "finetune", "llm", "-c", name]
    return shlex.join([*words, *source.trust.arguments(), *source.overrides])


def code_version() -> dict[str, str]:
    """Return the version of this package, the commit of its checkout (`+` if files differ from it), and a hash of its
    importable files."""
    version = {"version": __version__, "content": _content_hash()}
    if (_PACKAGE.parent / ".git").exists():
        commit = _git("rev-parse", "--short=12", "HEAD")
        if commit:
            version["commit"] = commit + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    return version


def _content_hash() -> str:
    digest = Checksum()
    # In a checkout `recipes` is a link, which rglob does not follow.
    for path in sorted({*_PACKAGE.rglob("*.py"), *(_PACKAGE / "recipes").rglob("*.py")}):
        digest.update(path.relative_to(_PACKAGE.parent).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(_PACKAGE.parent), *arguments], capture_output=True, text=True, timeout=5, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def summary_of(numbers: Mapping[str, float | int | None]) -> dict[str, str]:
    """Final figures as they are read."""
    return {name: f"{value:.4g}" for name, value in numbers.items() if value is not None}
