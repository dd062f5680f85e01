"""Implementation of `automodel data convert`."""

from __future__ import annotations

import re
from pathlib import Path

from automodel_cli.config.errors import DataError
from automodel_cli.config.fix_syntax import word
from automodel_cli.data.conversion import convert
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.tokenizer import load_tokenizer


def convert_data(
    source: str,
    target: Path,
    *,
    layout: str,
    tokenizer: str | None,
    column: str,
    split: str,
    name: str | None,
    append_eos: bool,
) -> None:
    """Convert a dataset, and print what was written."""
    loaded = None if tokenizer is None else load_tokenizer(ModelConfig(pretrained=tokenizer, tokenizer=tokenizer))
    try:
        dataset = SourceConfig(source, name=name, split=split)
        done = convert(dataset, target, tokenizer=loaded, layout=layout, column=column, append_eos=append_eos)
    except DataError as error:  # errors of the source name the keys of a config
        fix = error.fix and re.sub(r"\bdata\.(path|split)=", lambda key: "--split " * (key[1] == "split"), error.fix)
        raise DataError(error.message, code=error.code, fix=fix) from error
    if done.num_tokens is None:
        print(f"wrote {done.num_documents:,} rows to {target}")
    else:
        print(f"wrote {done.num_documents:,} documents with {done.num_tokens:,} tokens to {target}")
    print(f"next  data.path={word(target)}")
