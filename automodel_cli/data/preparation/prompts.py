"""Prepare prompts for generation: conversations without their final answer, with the row that rewards read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from automodel_cli.config.errors import DataError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.formats.builtin import find_format, format_name
from automodel_cli.data.formats.unused_columns import check_ignored
from automodel_cli.data.mixture import Mixture
from automodel_cli.data.pictures.reader import PictureSupport
from automodel_cli.data.preparation.prompt_dataset import Prompt, PromptDataset
from automodel_cli.data.preparation.prompt_reader import PromptReader, ToolsOf, no_tools
from automodel_cli.data.preparation.row_stream import shuffled
from automodel_cli.data.preparation.statistics import MANY, SpecialReport
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.sources.sources import Source, TaskSource, open_source
from automodel_cli.data.storage.cache import cache_root

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PromptReport:
    """Report of the preparation, for the startup summary."""

    names: list[str]
    num_train: int
    num_validation: int
    num_dropped: int
    longest: int
    limit: int
    needed: int
    special: SpecialReport

    def lines(self) -> list[str]:
        """Return the counts of both splits, and a warning if many prompts were skipped."""
        dropped = f", {self.num_dropped:,} longer than {self.limit} tokens dropped" if self.num_dropped else ""
        total = self.num_train + self.num_validation + self.num_dropped
        many = self.num_dropped > MANY * total
        share = f"{100 * self.num_dropped / max(1, total):.0f}% of the prompts are dropped because they are long"
        return [
            f"{', '.join(self.names)}: {self.num_train:,} prompts of up to {self.longest} tokens{dropped}",
            *([f"  warning: {share}: data.seq_len={self.needed} keeps all of them"] if many else []),
            *self.special.lines(),
            f"validation: {self.num_validation:,} prompts",
        ]


@dataclass(frozen=True)
class PreparedPrompts:
    """Prompts of a run that generates responses, with their report."""

    train: PromptDataset
    validation: PromptDataset | None
    report: PromptReport


def prepare_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    max_tokens: int,
    tools_of: ToolsOf = no_tools,
    samples_per_row: int = 1,
    pictures: PictureSupport | None = None,
) -> PreparedPrompts:
    """Read, render and tokenize all prompts.

    Prompts longer than `max_tokens` are dropped or rejected, depending on `data.truncation`. `samples_per_row` is the
    number of samples that share a packed row. `tools_of` returns the environment tools of a row, which the template
    renders. `pictures` reads the pictures of rows, which are rejected without it. Raises DataError that lists all
    rejected rows.
    """
    reader = PromptReader(config, tokenizer, max_tokens, tools_of, samples_per_row, pictures)
    root = cache_root(config.cache_dir)
    described = SourceConfig("task", format="messages")
    if config.generator is not None:
        train = [reader.read(TaskSource(config.generator, "train"), described)]
        held_out = [reader.read(TaskSource(config.generator, "validation"), described)]
        names = [type(config.generator).__name__]
    else:
        sources = config.train_sources()
        opened = [open_source(source, root) for source in sources]
        train = [reader.read(source, node) for source, node in zip(opened, sources, strict=True)]
        names = _names(opened, sources)
        held_out = [
            reader.read(open_source(each.source, root, whole=each.whole), each.source)
            for each in config.validation_sources()
        ]
    check_ignored(config.ignored_columns, reader.ignored.missing, reader.ignored.present)
    reader.finish()
    if config.validation_size:
        train, held_out = _hold_out(train, config.validation_size, seed)
    return _prepared(train, held_out, names, config.mixture(), reader)


def _prepared(
    train: list[list[Prompt]], held_out: list[list[Prompt]], names: list[str], mixture: Mixture, reader: PromptReader
) -> PreparedPrompts:
    for prompts, name in zip(train, names, strict=True):
        if not prompts:
            why = f": {reader.num_dropped:,} are longer than {reader.max_tokens} tokens" if reader.num_dropped else ""
            longer = reader.seq_len_of_all if reader.num_dropped else "<longer>"
            raise DataError(
                f"no prompt of {name} is left{why}",
                code="not_enough_rows",
                keys=("data.seq_len",),
                fix=f"data.seq_len={longer}",
            )
    dataset = PromptDataset(train, mixture)
    validation = PromptDataset(held_out, Mixture.single()) if any(held_out) else None
    longest = max(len(prompt.tokens) for prompt in dataset.prompts)
    num_validation = len(validation) if validation is not None else 0
    report = PromptReport(
        names,
        len(dataset),
        num_validation,
        reader.num_dropped,
        longest,
        reader.max_tokens,
        reader.seq_len_of_all,
        reader.special_report(),
    )
    return PreparedPrompts(dataset, validation, report)


def _names(opened: Sequence[Source], sources: Sequence[SourceConfig]) -> list[str]:
    """Return each source with the name of its format, if the config names one."""
    chosen = ["" if node.format == "auto" else f" ({format_name(find_format(node.format))})" for node in sources]
    notes = [f" ({source.note})" if source.note else "" for source in opened]
    return [f"{source.name}{fmt}{note}" for source, fmt, note in zip(opened, chosen, notes, strict=True)]


def _hold_out(train: list[list[Prompt]], wanted: float, seed: int) -> tuple[list[list[Prompt]], list[list[Prompt]]]:
    """Move validation prompts out of all sources together, by a seeded shuffle."""
    everything = [prompt for prompts in train for prompt in prompts]
    number = max(1, round(wanted * len(everything))) if wanted < 1 else int(wanted)
    if number >= len(everything):
        raise DataError(
            f"validation_size={wanted:g} leaves no training prompts: the dataset has {len(everything):,} prompts",
            code="not_enough_rows",
            keys=("data.validation_size",),
            fix="data.validation_size=0.1",
        )
    chosen = {everything[i].number for i in shuffled(len(everything), seed, 0x5EED)[:number].tolist()}
    kept = [[prompt for prompt in prompts if prompt.number not in chosen] for prompts in train]
    return kept, [[prompt for prompt in everything if prompt.number in chosen]]
