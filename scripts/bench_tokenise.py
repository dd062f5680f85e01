"""Rows per CPU second of data preparation, and its memory: `python scripts/bench_tokenise.py TOKENIZER [--rows N]`.

Rows are conversations of about 1 kB (`--turns` pairs of messages) made of the words of this repository's documents.
TOKENIZER is a folder or a GGUF file with a tokenizer; one without a chat template gets ChatML. CPU seconds are those of
`prepare` and of its workers, without imports; memory is the peak of the process that prepares, above its start.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from automodel_cli.data.config import DataConfig
from automodel_cli.data.preparation.pipeline import prepare_data

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def rows(number: int, turns: int, characters: int, words: list[str]) -> Iterator[dict[str, Any]]:
    """Conversations of about `characters` characters."""
    rng = random.Random(0)
    each = characters // (2 * turns) // 6  # a word and its space are about six characters
    for _ in range(number):
        texts = [" ".join(rng.choices(words, k=each)) for _ in range(2 * turns)]
        yield {"messages": [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(texts)]}


def load_tokenizer(path: Path) -> Any:
    """From a folder, or from a GGUF file."""
    if path.suffix == ".gguf":
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    else:
        tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = tokenizer.chat_template or CHATML
    return tokenizer


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    return sum(os.times()[:4])


def main() -> None:
    """One line: rows, bytes, tokens, CPU seconds, rows per CPU second, memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--characters", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--form", choices=("jsonl", "json"), default="jsonl", help="lines, or one array")
    arguments = parser.parse_args()
    root = Path(__file__).parents[1]
    words = " ".join(path.read_text() for path in sorted(root.glob("*.md"))).split()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rows.{arguments.form}"
        with path.open("w") as file:
            made = rows(arguments.rows, arguments.turns, arguments.characters, words)
            file.write("[" if arguments.form == "json" else "")
            for i, row in enumerate(made):
                file.write((",\n" if arguments.form == "json" else "\n") if i else "")
                file.write(json.dumps(row))
            file.write("]" if arguments.form == "json" else "\n")
        tokenizer = load_tokenizer(arguments.tokenizer)
        config = DataConfig(path=str(path), cache_dir=f"{folder}/cache", num_workers=arguments.workers)
        before, memory = cpu_seconds(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        report = prepare_data(config, tokenizer, seed=0, progress=lambda line: None).report.train[0]
        seconds = cpu_seconds() - before
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) >> 10
        print(
            f"{report.num_rows:,} rows, {path.stat().st_size / 1e6:.0f} MB, {report.num_tokens:,} tokens: "
            f"{seconds:.1f} CPU s, {report.num_rows / seconds:,.0f} rows per CPU s, {grown:,} MiB more memory"
        )


if __name__ == "__main__":
    main()
