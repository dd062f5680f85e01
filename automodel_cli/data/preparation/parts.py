"""Datasets between tokenization and packing, with the rules for invalid rows and the split of validation rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from automodel_cli.config.errors import DataError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.formats.unused_columns import check_ignored
from automodel_cli.data.preparation.row_stream import shuffled
from automodel_cli.data.row_errors import refuse_damaged, rows_error
from automodel_cli.data.sources.sources import Source
from automodel_cli.data.storage.indexed_store import IndexedTokens
from automodel_cli.data.storage.memmap_store import TokenStore


@dataclass(frozen=True)
class Part:
    """One dataset during preparation: source, tokens, the documents selected for this split, and its index in the
    mixture, -1 for none."""

    source: Source
    tokens: TokenStore | IndexedTokens
    key: str
    built: bool
    documents: np.ndarray | None = None
    held_out: str = ""
    number: int = -1


def check_names(config: DataConfig, parts: Sequence[Part]) -> None:
    """A name that is to be ignored must be in one dataset at least."""
    metas = [part.tokens.meta for part in parts]
    missing = set.intersection(*(set(meta["not_ignored"]) for meta in metas))
    check_ignored(config.ignored_columns, missing, {name for meta in metas for name in meta["names"]})


def check_rows(config: DataConfig, parts: Sequence[Part]) -> None:
    """Apply the policy for invalid rows over all datasets together, so that one run shows every problem."""
    rejected = [row for part in parts for row in part.tokens.rejected()]
    num_rows = sum(part.tokens.meta["num_rows"] for part in parts)
    if rejected and config.on_invalid_row == "fail":
        fix = "correct the rows"
        if len(rejected) < num_rows:
            fix += ", or skip them: data.on_invalid_row=drop"
            if len(rejected) > config.max_invalid_fraction * num_rows:
                fix += f" data.max_invalid_fraction={_round_up(len(rejected) / num_rows)}"
        raise rows_error(rejected, num_rows, fix=fix)
    refuse_damaged(rejected, num_rows)
    if len(rejected) > config.max_invalid_fraction * num_rows:
        error = rows_error(rejected, num_rows, fix=f"data.max_invalid_fraction={_round_up(len(rejected) / num_rows)}")
        raise DataError(
            f"the rejected rows exceed data.max_invalid_fraction={config.max_invalid_fraction}: {error.message}",
            code="bad_rows",
            keys=("data.max_invalid_fraction",),
            fix=error.fix,
        )
    for part in parts:
        if not part.tokens.meta["num_rows"]:
            raise DataError(f"{part.source.name} has no rows", code="not_enough_rows")
        if not part.tokens.num_documents:
            raise DataError(
                f"all {part.tokens.meta['num_rows']:,} rows of {part.source.name} are rejected", code="not_enough_rows"
            )


def _round_up(share: float) -> float:
    return float(min(1.0, np.ceil(share * 100 + 1e-9) / 100))


def hold_out(parts: list[Part], wanted: float, seed: int) -> tuple[list[Part], list[Part]]:
    """Move validation rows out of every dataset, in proportion to its size, by a seeded shuffle. All documents of a row
    move together, because those of one conversation repeat each other.
    """
    sizes = np.array([part.tokens.num_used_rows for part in parts])
    total = int(sizes.sum())
    number = max(1, round(wanted * total)) if wanted < 1 else int(wanted)
    if number >= total:
        raise DataError(
            f"validation_size={wanted:g} leaves no training rows: the dataset has {total:,} rows",
            code="not_enough_rows",
            keys=("data.validation_size",),
            fix="data.validation_size=0.1",
        )
    exact = number * sizes / total
    shares = np.floor(exact).astype(int)
    shares[np.argsort(shares - exact, kind="stable")[: number - shares.sum()]] += 1
    train, validation = [], []
    for index, (part, share) in enumerate(zip(parts, shares.tolist(), strict=True)):
        num_rows = part.tokens.num_used_rows
        held_out = np.isin(part.tokens.row_numbers(), shuffled(num_rows, seed, index, 0x5EED)[:share])
        name = f"{share} of seed {seed}, {index}"
        if share == num_rows:
            raise DataError(
                f"validation_size={wanted:g} leaves no training rows of {part.source.name}, which has {num_rows:,}",
                code="not_enough_rows",
                keys=("data.validation_size",),
                fix="data.validation_size=0.1",
            )
        train.append(replace(part, documents=np.flatnonzero(~held_out), held_out=f"without {name}"))
        if share:
            validation.append(replace(part, documents=np.flatnonzero(held_out), held_out=name))
    return train, validation
