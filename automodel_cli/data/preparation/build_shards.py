"""Tokenize a part of the data in shards, ahead of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from automodel_cli.data.config import DataConfig
from automodel_cli.data.encoding.workers import choose_workers
from automodel_cli.data.groups import GroupSpec
from automodel_cli.data.labels import LabelSpec
from automodel_cli.data.preparation.kept_shards import list_shards, preparing
from automodel_cli.data.preparation.parts import Part, check_names, check_rows
from automodel_cli.data.preparation.pipeline import DataBuilder, Progress, data_kind
from automodel_cli.data.preparation.token_shards import TokenShards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def build_shards(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    index: int,
    count: int,
    preferences: bool = False,
    stop_ids: Sequence[int] = (),
    progress: Progress | None = None,
    row_spec: LabelSpec | GroupSpec | None = None,
) -> int:
    """Tokenize part `index` of `count` of the data, and return how many shards of the other parts are incomplete.

    Arguments are those of `prepare_data`. Call it afterwards. It joins the shards, and builds those that nobody builds.
    """
    kind = data_kind(preferences, row_spec)
    config.check_kind(kind)
    show = progress or (lambda line: print(line, file=sys.stderr))
    every = DataBuilder(config, tokenizer, kind, tuple(stop_ids), show, None, row_spec).shards()
    with ExitStack() as locks:
        for shards in every if config.start_after is not None else ():
            list_shards(shards)
            locks.enter_context(preparing(shards.folder))
        for shards in every:
            workers = choose_workers(config.num_workers, shards.source.num_bytes // count)
            shards.build([number for number in shards.missing() if number % count == index], workers, show)
    left = sum(len(shards.missing()) for shards in every)
    if config.start_after is not None and not left:
        _check_kept(config, every, show)
    return left


def _check_kept(config: DataConfig, every: Sequence[TokenShards], show: Progress) -> None:
    """Print the totals of complete shards. Raises DataError for rejected rows and for names that no row has."""
    parts = []
    for shards in every:
        totals, unseen = shards.totals()
        unseen.check()
        parts.append(Part(shards.source, totals, shards.key, True))
        rows, tokens = totals.meta["num_rows"], int(totals.offsets[-1])
        show(f"{shards.source.name}: {len(shards.spans):,} shards, {rows:,} rows, {tokens:,} tokens")
    check_names(config, parts)
    check_rows(config, parts)
