"""Implementation of `automodel data prepare`: tokenize and pack data ahead of a run."""

from __future__ import annotations

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.tokenizer import load_tokenizer
from automodel_cli.run.checks.cross_section_checks import check_exported
from automodel_cli.run.recipe import Recipe


def prepare_data(recipe: Recipe, *, index: int, count: int) -> None:
    """Tokenize part `index` of `count`. The process after which nothing is left joins and packs the data."""
    starts_early = recipe.data.start_after is not None
    if recipe.data.streaming is not None and not starts_early:
        raise ConfigError(
            "data.streaming reads the rows while the run trains, so there is nothing to prepare",
            code="no_effect",
            keys=("data.streaming",),
            fix="data.streaming=null, or data.start_after=8 to train while later shards are prepared",
        )
    check_exported(recipe.model)
    tokenizer = load_tokenizer(recipe.model)
    left = recipe.prepare_shards(tokenizer, index, count)
    if left:
        print(f"part {index} of {count} is complete; {left} shards of other parts are not")
        return
    if starts_early:
        print("all shards are prepared, and runs read them in place")
        return
    print("\n".join(recipe.prepared(tokenizer).report.lines()))
