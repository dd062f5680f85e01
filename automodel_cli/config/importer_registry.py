"""Every tool that configs are imported from, and which of them a file was written for."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from automodel_cli.config.importers import axolotl, llama_factory, nemo_automodel, prime_rl, trl, verl
from automodel_cli.config.importers.framework import Table, flatten_keys

TABLES: dict[str, Table] = {
    module.TABLE.slug: module.TABLE for module in (axolotl, llama_factory, trl, nemo_automodel, verl, prime_rl)
}


def recognise(tree: Mapping[str, object], unknown: Collection[str] | None = None) -> Table | None:
    """Return the tool that a file was written for: the one with the largest share of its required keys. None if no tool
    has enough. `unknown`: root keys that this package does not have.
    """
    if unknown is not None:
        tree = {key: tree[key] for key in unknown if key in tree}
    keys = set(flatten_keys(tree)) | set(tree)
    counts = {slug: len(keys & set(table.signs[1])) for slug, table in TABLES.items()}
    likely = max(TABLES, key=lambda slug: counts[slug] / TABLES[slug].signs[0])
    return TABLES[likely] if counts[likely] >= TABLES[likely].signs[0] else None
