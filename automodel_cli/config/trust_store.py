"""What the user allowed when a run began, so that `resume` need not ask again.

It stands in the run's folder, sealed with a key from the user's home. Another user's folder, a config that was edited
since, and a file that somebody put there do not bear the seal, and then nothing is remembered.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from pathlib import Path

from automodel_cli.config.safe_files import read_regular, replace
from automodel_cli.config.trust import WORDS, Trust

FILE = "trust.json"
_CONFIG = "config.yaml"


def remember(folder: Path, trust: Trust, config: str) -> None:
    """Write what is allowed beside the run's `config.yaml`, whose text is `config`; nothing where nothing is.

    The file is not read again: another user may have replaced it. A home that cannot be written to means only that
    `resume` asks again.
    """
    path = folder / FILE
    if not trust:
        path.unlink(missing_ok=True)
        return
    key = _key(make=True)
    if key is not None:
        words, packages = sorted(trust.words), list(trust.packages)
        seal = _seal(key, words, packages, config.encode())
        replace(path, json.dumps({"trust": words, "packages": packages, "seal": seal}, indent=1) + "\n")


def load_trust(folder: Path, config: bytes) -> Trust:
    """What was allowed for the `config.yaml` of `folder` with this content, which is what was composed; with a note
    where something was allowed, but not for it."""
    try:
        stored = json.loads(read_regular(folder / FILE))
        words, packages, seal = stored["trust"], stored["packages"], stored["seal"]
        assert all(isinstance(name, str) for name in (*words, *packages, seal))
    except FileNotFoundError:
        return Trust()
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        return Trust(note=f"{FILE} of the run cannot be read")
    key = _key(make=False)
    if key is None or not hmac.compare_digest(seal, _seal(key, words, packages, config)):
        return Trust(note=f"{FILE} does not count: {_CONFIG} was edited since, or another user began the run")
    return Trust(frozenset(words) & frozenset(WORDS), tuple(packages))


def _seal(key: bytes, words: list[str], packages: list[str], config: bytes) -> str:
    content = json.dumps([words, packages, hashlib.sha256(config).hexdigest()])
    return hmac.new(key, content.encode(), "sha256").hexdigest()


def _key(*, make: bool) -> bytes | None:
    """The user's own key, readable by nobody else; None where there is none and none can be made."""
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = state / "automodel" / "trust.key"
    try:
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            fresh = path.with_name(f"{path.name}.{os.getpid()}")
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(os.urandom(32))
            try:
                os.link(fresh, path)  # of two runs that begin at once, one makes the key
            except FileExistsError:
                pass
            finally:
                fresh.unlink()
        found = path.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            return None
        return path.read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
