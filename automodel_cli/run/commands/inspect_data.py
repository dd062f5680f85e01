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
    prepared = recipe.prepared(tokenizer)
    if isinstance(prepared, PreparedPrompts):
        show_prompts(prepared, tokenizer, rows=rows)
    elif isinstance(prepared, StreamedData):
        show_rows(PreparedData(prepared.train.sample, prepared.validation, prepared.report), tokenizer, rows=rows)
    else:
        show_rows(prepared, tokenizer, rows=rows)
