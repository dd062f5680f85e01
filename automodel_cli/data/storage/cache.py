"""A content-addressed cache of folders. One process builds an entry while others wait. A killed process leaves no
entry.

The name of an entry is the hash of everything that determines its content, including the code of this package. It is
built under a temporary name in the same folder and renamed when complete, so an existing entry was complete once. Later
damage (disk errors, a partial copy) is detected by the sizes and hashes in its `files.json`; the entry is then rebuilt.
A file lock admits one builder. It needs no process group, so ranks may call it before `init_process_group`, and no
collective operation waits for tokenization.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING

from automodel_cli.config.errors import DataError
from automodel_cli.config.security.safe_files import open_own
from automodel_cli.data.storage.checksums import content_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REMEMBERED_HASH_BYTES = 64 << 20
HASHED_BYTES = 64 << 20
"""Files of an entry up to this size are verified by content (at most 10 ms), larger ones (tokens) by size."""
MANIFEST = "files.json"
WAIT_SECONDS = 5.0
_DATA = Path(__file__).resolve().parents[1]
CODE_FILES = (
    "chat/encoder.py",
    "chat/end_of_turn.py",
    "chat/multi_turn.py",
    "chat/prefix_tokenizer.py",
    "chat/renderer.py",
    "chat/special_tokens.py",
    "chat/template_coverage.py",
    "chat/turn_spans.py",
    "encoding/encode_spec.py",
    "encoding/grouped.py",
    "encoding/infill.py",
    "encoding/labeled.py",
    "encoding/row_encoder.py",
    "encoding/text_encoder.py",
    "fill_in_the_middle.py",
    "formats/base.py",
    "formats/builtin.py",
    "formats/column_mapping.py",
    "formats/examples.py",
    "formats/format_reader.py",
    "formats/groups.py",
    "formats/labeled.py",
    "formats/messages.py",
    "formats/preference.py",
    "formats/row_accessor.py",
    "formats/tool_calls.py",
    "formats/unused_columns.py",
    "groups.py",
    "json_array.py",
    "json_reader.py",
    "json_strings.py",
    "labels.py",
    "packing.py",
    "picture.py",
    "pictures/content.py",
    "pictures/reader.py",
    "pictures/rows.py",
    "pictures/storage.py",
    "preparation/indexed.py",
    "preparation/parts.py",
    "preparation/pipeline.py",
    "preparation/row_packer.py",
    "preparation/token_shards.py",
    "preparation/token_writer.py",
    "row_errors.py",
    "sources/compressed.py",
    "sources/file_readers.py",
    "sources/spans.py",
    "sources/text_reader.py",
    "storage/cache.py",
    "storage/checksums.py",
    "storage/indexed_store.py",
    "storage/memmap_store.py",
    "storage/memmap_writer.py",
    "token_files/detection.py",
    "token_files/megatron.py",
    "token_files/nanogpt.py",
    "token_files/reader.py",
    "token_files/token_file.py",
    "tokenized.py",
)


def cache_root(configured: str | None) -> Path:
    """The configured folder, `$AUTOMODEL_CACHE`, or `automodel` in the user's cache folder."""
    chosen = configured or os.environ.get("AUTOMODEL_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "automodel"


def entry_key(ingredients: dict[str, object]) -> str:
    """Hash of named ingredients (JSON values) and of the code that turns them into an entry."""
    text = json.dumps({"code": data_code_version(), **ingredients}, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def data_code_version() -> str:
    """Return the hash of the source files that determine the content of an entry."""
    digest = hashlib.sha256()
    for name in CODE_FILES:
        digest.update(name.encode() + (_DATA / name).read_bytes())
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the hash of a tokenizer's behavior: vocabulary, rules and special tokens. Neither the chat template nor
    the path is included.
    """
    parts = [type(tokenizer).__name__, json.dumps(_plain(tokenizer.special_tokens_map), sort_keys=True)]
    if tokenizer.is_fast:
        # skip truncation and padding, which precede "added_tokens": earlier calls set them, and we do not use them
        head, key, rules = tokenizer.backend_tokenizer.to_str().partition('"added_tokens"')
        parts.append(rules if key else head)
    else:
        settings = {key: str(value) for key, value in tokenizer.init_kwargs.items() if key != "name_or_path"}
        parts.append(json.dumps([sorted(tokenizer.get_vocab().items()), settings], sort_keys=True))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [str(item) for item in value] if isinstance(value, list | tuple) else str(value)


def file_hash(path: Path, root: Path) -> str:
    """Return the hash of a file. Hashes of large files are cached by file identity, size and modification time."""
    stat = path.stat()
    if stat.st_size < REMEMBERED_HASH_BYTES:
        return content_hash(path)
    identity = f"{path.resolve()} {stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
    note = root / "hashes" / f"{hashlib.sha256(identity.encode()).hexdigest()}.xxh3"
    if note.is_file():
        return note.read_text()
    digest = content_hash(path)
    with suppress(OSError):  # with a full or read-only cache the next start reads the file again
        note.parent.mkdir(parents=True, exist_ok=True)
        temporary = note.with_suffix(f".{os.getpid()}")
        temporary.write_text(digest)
        temporary.replace(note)
    return digest


def get_or_build(root: Path, key: str, build: Callable[[Path], None]) -> tuple[Path, bool]:
    """Return the folder of entry `key`, and whether this call built it.

    `build` fills an empty folder. Its exceptions are passed on. A damaged entry is rebuilt, with a message on standard
    error. Safe to call from any number of processes at once. Raises DataError if the disk is full or the folder is not
    writable.
    """
    final = root / key
    if final.is_dir() and damage(final) is None:
        return final, False
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f"{key}.lock"):
            for left_over in root.glob(f"{key}.tmp-*"):  # of a killed process: it held this lock, so it is gone
                shutil.rmtree(left_over)
            if final.is_dir():
                if (reason := damage(final)) is None:
                    return final, False
                print(f"the data cache is damaged and is built again: {final}: {reason}", file=sys.stderr, flush=True)
                doomed = root / f"{key}.tmp-damaged"
                final.rename(doomed)
                shutil.rmtree(doomed)
            temporary = root / f"{key}.tmp-{os.getpid()}"
            temporary.mkdir()
            try:
                build(temporary)
                _write_manifest(temporary)
                _to_disk(temporary)
                temporary.rename(final)
            except BaseException:
                shutil.rmtree(temporary, ignore_errors=True)
                raise
    except OSError as error:
        is_cache_error = error.filename is None or str(error.filename).startswith(str(root))  # not an unreadable source
        if not is_cache_error or error.errno not in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EACCES,
            errno.EROFS,
            errno.EPERM,
        ):
            raise
        raise cache_unwritable(root, error) from error
    return final, True


def cache_unwritable(root: Path, error: OSError) -> DataError:
    """Return the error for a full or read-only disk."""
    reason = f"cannot write the data cache {root}: {os.strerror(error.errno or 0)}"
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return DataError(
        reason,
        code="disk_full" if full else "unwritable_file",
        keys=("data.cache_dir",),
        fix="data.cache_dir=<a writable folder with free space>",
    )


def _write_manifest(folder: Path) -> None:
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    files = {
        name: [size, content_hash(folder / name) if size <= HASHED_BYTES else None] for name, size in sizes.items()
    }
    (folder / MANIFEST).write_text(json.dumps(files))


def damage(folder: Path) -> str | None:
    """Return a description of the damage of an entry, or None."""
    try:
        files = dict(json.loads((folder / MANIFEST).read_bytes()))
        for name, (size, digest) in files.items():
            num_bytes = (folder / name).stat().st_size
            if num_bytes != size:
                return f"{name} has {num_bytes:,} bytes, not {size:,}"
            if digest is not None and content_hash(folder / name) != digest:
                return f"{name} holds other bytes than were written"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (ValueError, TypeError):
        return f"{MANIFEST} cannot be read"
    return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for an exclusive lock and hold it. The kernel releases the lock of a process that dies."""
    with open_own(path, "a+") as file:
        if not _soon(file):
            file.seek(0)
            print(f"waiting for {file.read() or 'another process'}, which prepares the same data", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


def _soon(file: IO[str]) -> bool:
    """Return whether the lock is acquired within a few seconds, as with the ranks of one run."""
    deadline = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)


def _to_disk(folder: Path) -> None:
    """Flush to disk before the rename, so that after a power cut no entry exists without its files."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
