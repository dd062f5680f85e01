"""Suggestions if a model or dataset is not available from the Hugging Face hub. Imports no library."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from automodel_cli.config.fix_syntax import word

_NO_NETWORK = ("OfflineModeIsEnabled", "LocalEntryNotFoundError", "ConnectError", "ConnectTimeout", "gaierror")
_SAID = ("couldn't connect to", "couldn't reach", "offline mode", "name or service not known", "name resolution")
_OFF = ("", "0", "false", "no", "off")


def is_offline(error: BaseException) -> bool:
    """Return whether `error`, or one of its causes, means that the hub could not be reached."""
    for cause in _chain(error):
        names = {cls.__name__ for cls in type(cause).__mro__}
        text = str(cause).lower()
        if names.intersection(_NO_NETWORK) or any(phrase in text for phrase in _SAID):
            return True
    return False


def not_here(repo: str) -> str:
    """Explain why a repository is not available: how the hub is disabled, and which cache was searched."""
    switch = next((name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if _is_on(name)), None)
    why = f"{switch}={os.environ[switch]} is set" if switch else "the hub cannot be reached from this machine"
    return f"{why}, and the cache HF_HOME={home()} holds no {repo}"


def download(repo: str, revision: str | None = None) -> str:
    """Return the fix for a model: the command that fills the cache on a machine with network access."""
    words = ["hf", "download", repo, *(["--revision", revision] if revision else [])]
    command = " ".join(map(word, words))
    return f"{command}   (where there is a network, with this HF_HOME or one to copy; then HF_HUB_OFFLINE=1 here)"


def download_rows(repo: str, revision: str | None = None) -> str:
    """Return the fix for a dataset: `datasets` reads no repository from the cache, so its files get a folder."""
    folder = f"data/{repo.rpartition('/')[2]}"
    words = ["hf", "download", repo, "--repo-type", "dataset", "--local-dir", folder]
    command = " ".join(map(word, [*words, *(["--revision", revision] if revision else [])]))
    return f"{command}   (where there is a network; then here data.path={folder}, or the files of one split in it)"


def home() -> Path:
    """Return the folder of the hub's cache, as `huggingface_hub` finds it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("HF_HOME") or cache / "huggingface").expanduser()


def _is_on(name: str) -> bool:
    return os.environ.get(name, "").lower() not in _OFF


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    for _ in range(20):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__
