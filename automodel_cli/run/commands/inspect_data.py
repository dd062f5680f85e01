"""Implementation of `automodel data inspect`: print rows as the recipe encodes them."""

from __future__ import annotations

from automodel_cli.data.preparation.inspect_rows import show_prompts, show_rows
from automodel_cli.data.preparation.pipeline import PreparedData
from automodel_cli.data.preparation.prompts import PreparedPrompts
from automodel_cli.data.streaming.streamed_data import StreamedData
from automodel_cli.models.tokenizer import load_tokenizer
from automodel_cli.run.checks.cross_section_checks import check_exported
from automodel_cli.run.recipe import Recipe


def inspect_data(recipe: Recipe, *, rows: int) -> None:
    """Print prepared sequences with trained tokens marked, or prompts as the model reads them, and the totals."""
    check_exported(recipe.model)
    tokenizer = load_tokenizer(recipe.model)
    match recipe.prepared(tokenizer):
        case PreparedPrompts() as prompts:
            show_prompts(prompts, tokenizer, rows=rows)
        case StreamedData() as data:
            show_rows(PreparedData(data.train.sample, data.validation, data.report), tokenizer, rows=rows)
        case data:
            show_rows(data, tokenizer, rows=rows)
