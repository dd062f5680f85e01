"""Store the permissions of a run, so that `resume` does not ask again.

They are stored in the run's folder, sealed with a key from the user's home. Another user's folder, an edited config and
a file from another user do not have the seal. Then no permissions are restored.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from pathlib import Path

from automodel_cli.config.security.safe_files import read_regular, replace
from automodel_cli.config.security.trust import WORDS, Trust

FILE = "trust.json"
_CONFIG = "config.yaml"


def remember(folder: Path, trust: Trust, config: str) -> None:
    """Write the permissions next to the run's `config.yaml` with the text `config`. Nothing is written without
    permissions.

    The file is not read again, because another user may have replaced it. If the home folder is not writable, `resume`
    asks again.
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
    """Return the permissions for the `config.yaml` of `folder` with this content. A note explains if there are
    permissions for another content."""
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
    """Return the user's private key. None if there is none and none can be created."""
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
        status = path.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            return None
        return path.read_bytes()
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
