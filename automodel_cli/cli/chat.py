"""`chat RUN`: a conversation with the model of a run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from automodel_cli.cli import common, completion_values
from automodel_cli.config.errors import ConfigError


@click.command()
@click.argument("run", metavar="RUN", shell_complete=completion_values.runs)
@common.checkpoint_option
@click.option(
    "--compare", multiple=True, metavar="RUN|MODEL", help="Also print the responses of this model. Repeatable."
)
@click.option(
    "--unmerged", is_flag=True, help="For runs with LoRA: load the adapters and the base model, not the merged export."
)
@click.option(
    "--max-new-tokens",
    default=512,
    show_default=True,
    type=click.IntRange(min=1),
    metavar="N",
    help="Largest number of tokens of a response.",
)
@click.option(
    "--temperature",
    metavar="T",
    default=0.0,
    show_default=True,
    type=click.FloatRange(min=0),
    help="Sampling temperature. 0: greedy.",
)
@click.option(
    "--top-p",
    metavar="P",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Nucleus sampling threshold.",
)
@click.option("--seed", default=0, show_default=True, metavar="N", help="Sampling seed.")
@click.option(
    "--image",
    "images",
    multiple=True,
    metavar="PATH",
    help="A picture for the first message of each conversation. Repeatable.",
)
@click.option("--one-conversation", is_flag=True, help="Treat all lines of a pipe as one conversation.")
def chat(
    run: str,
    checkpoint: str | None,
    compare: tuple[str, ...],
    unmerged: bool,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    images: tuple[str, ...],
    one_conversation: bool,
) -> int:
    """Chat with a run's export in the terminal.

    The transformers library generates the responses, as it does wherever you load the export. If stdin is a pipe, each
    line starts a new conversation.

    A vision-language model also reads pictures: --image, or /image PATH in the conversation.

    With --checkpoint, RUN/exports/step-NNNNNN is written first if it is missing.
    """
    folder = common.run_folder(run, "export", *common.with_checkpoints(checkpoint))
    export = common.export_that_talks(folder, checkpoint)
    adapter = export / "adapter" if unmerged else None
    base = _base_of(adapter) if adapter is not None else str(export)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0}
    if temperature > 0:
        options |= {"temperature": temperature, "top_p": top_p, "top_k": 0}
    import torch

    from automodel_cli.run.commands.chat import Speaker, converse, load_pictures

    torch.manual_seed(seed)
    speakers = [Speaker.load(folder.name, base, adapter=adapter)]
    for name in compare:
        other = _folder(name)
        speakers.append(Speaker.load(name, str(common.export_that_talks(other)) if other else name))
    pictures = load_pictures(speakers, images)
    return converse(speakers, options, one_conversation=one_conversation or sys.stdin.isatty(), pictures=pictures)


def _folder(name: str) -> Path | None:
    return next((p for p in (Path(name), Path("runs") / name) if (p / "config.yaml").is_file()), None)


def _base_of(adapter: Path) -> str:
    """The model that the adapters belong to, as their config names it."""
    try:
        name = json.loads((adapter / "adapter_config.json").read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError):
        message = f"--unmerged requires a run with LoRA, but {adapter} contains no adapters"
        raise ConfigError(message, code="wrong_recipe", keys=("--unmerged",)) from None
    if not name:
        message = "--unmerged requires a base model, but the run began with random weights"
        raise ConfigError(message, code="model_not_found", keys=("--unmerged",))
    return str(name)
