"""The code that the name of a cache entry covers."""

from __future__ import annotations

from automodel_cli.data.storage.cache import CODE_FILES
from tests.unit.repository.test_import_circles import ROOT, imports, modules

_DATA = "automodel_cli.data."
WITHOUT_INFLUENCE = {
    "batch": "microbatches, made of entries",
    "chat.chat_template": "the chosen template is part of the name",
    "chat.time_limit": "raises only",
    "config": "its values are part of the name",
    "encoding.pre_rendered": "raises only",
    "encoding.workers": "the order of rows does not depend on it",
    "pictures.pixels": "pixels are decoded by a run",
    "preparation.dataset": "reads entries",
    "preparation.kept_shards": "reads entries",
    "preparation.masked_by": "a line of the report",
    "preparation.packed_rows": "reads entries",
    "preparation.preparation_progress": "progress",
    "preparation.row_stream": "its shuffles stay the same, for resumed runs",
    "preparation.statistics": "the report",
    "source_config": "its values are part of the name",
    "sources.remote_path": "opens files",
    "sources.sources": "files and their hashes are part of the name",
    "storage.code_fingerprint": "the code of own nodes",
}
"""Modules that files of the key import -> why the key does not contain them."""


def test_the_key_contains_the_code_that_makes_entries() -> None:
    known = modules(ROOT, ("automodel_cli",))
    listed = {name.removesuffix(".py").replace("/", ".") for name in CODE_FILES}
    imported = {found for name in listed for found in imports(_DATA + name, known[_DATA + name], known)}
    others = {found.removeprefix(_DATA) for found in imported if found.startswith(_DATA)} - listed
    assert others == WITHOUT_INFLUENCE.keys()
