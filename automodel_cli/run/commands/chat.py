"""Chat with trained models in the terminal, based on `generate` of transformers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    TextIteratorStreamer,
)

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.plain_text import visible
from automodel_cli.distributed.device_threads import on_this_device
from automodel_cli.models import transformers_compat

_HELP = "/new starts a new conversation, /quit or Ctrl-D exits"


@dataclass
class Speaker:
    """One model with the conversation as it has gone with it."""

    name: str
    model: Any
    tokenizer: Any
    messages: list[dict[str, str]]

    @classmethod
    def load(cls, name: str, folder: str, *, adapter: Path | None = None, trust_remote_code: bool = False) -> Speaker:
        """Load a folder or hub id with `transformers`. With `adapter`, add unmerged adapters."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        with transformers_compat.quiet():
            is_text_model = trust_remote_code or type(AutoConfig.from_pretrained(folder)) in MODEL_FOR_CAUSAL_LM_MAPPING
            auto: Any = AutoModelForCausalLM if is_text_model else AutoModelForImageTextToText
            model: Any = auto.from_pretrained(folder, dtype="auto", **options)
        model.to(device)
        if adapter is not None:
            try:
                from peft import PeftModel
            except ImportError:
                raise ConfigError(
                    "chat with adapters requires the package peft, which is not installed",
                    code="missing_package",
                    fix="pip install 'automodel-cli[peft]'",
                ) from None
            model.generation_config = GenerationConfig.from_pretrained(adapter.parent)  # with the trained stop tokens
            model = PeftModel.from_pretrained(model, str(adapter))
            model.to(device)
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        return cls(name, model.eval(), tokenizer, [])

    def answer(self, question: str, options: dict[str, Any]) -> Iterator[str]:
        """Yield the pieces of the response as they arrive, then add it to the conversation."""
        self.messages.append({"role": "user", "content": question})
        if self.tokenizer.chat_template:
            encoded = self.tokenizer.apply_chat_template(
                self.messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
        else:
            encoded = self.tokenizer(question, return_tensors="pt")
        inputs = {name: encoded[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
        streamer = TextIteratorStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True)
        failure: list[BaseException] = []

        def generate() -> None:
            try:
                self.model.generate(**inputs, **options, streamer=streamer)
            except BaseException as error:
                failure.append(error)
                streamer.end()

        thread = threading.Thread(target=on_this_device(generate), daemon=True)
        thread.start()
        pieces = []
        for piece in streamer:
            pieces.append(piece)
            yield visible(piece)
        thread.join()
        if failure:
            raise failure[0]
        self.messages.append({"role": "assistant", "content": "".join(pieces)})


def converse(
    speakers: list[Speaker],
    options: dict[str, Any],
    read: Callable[[], str] | None = None,
    *,
    one_conversation: bool = True,
) -> int:
    """Read questions from the terminal (or a pipe, one per line) until it ends. Show responses of several models side
    by side. Without `one_conversation`, each question starts a new conversation."""
    hint = f"   ({_HELP})" if one_conversation else ""
    print(f"{' | '.join(speaker.name for speaker in speakers)}{hint}")
    while True:
        try:
            question = (read or _ask)()
        except (EOFError, KeyboardInterrupt):
            return 0
        if question in ("/quit", "/exit"):
            return 0
        if question == "/new" or not one_conversation:
            for speaker in speakers:
                speaker.messages.clear()
        if question != "/new" and question.strip():
            if len(speakers) == 1:
                _stream(speakers[0], question, options)
            else:
                _show_columns(speakers, question, options)


def _ask() -> str:
    question = input("> " if sys.stdin.isatty() else "")
    if not sys.stdin.isatty():
        print(f"> {question}")
    return question


def _stream(speaker: Speaker, question: str, options: dict[str, Any]) -> None:
    for piece in speaker.answer(question, options):
        print(piece, end="", flush=True)
    print()


def _show_columns(speakers: list[Speaker], question: str, options: dict[str, Any]) -> None:
    """Show one column per model, redrawn as pieces arrive, or plain blocks without a terminal."""
    if not sys.stdout.isatty():
        for speaker in speakers:
            print(f"[{speaker.name}] {''.join(speaker.answer(question, options))}")
        return
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    texts = ["" for _ in speakers]

    def table() -> Table:
        columns_table = Table(expand=True)
        for speaker in speakers:
            columns_table.add_column(speaker.name, ratio=1)
        columns_table.add_row(*map(Text, texts))
        return columns_table

    with Live(table(), refresh_per_second=12) as live:
        for index, speaker in enumerate(speakers):
            for piece in speaker.answer(question, options):
                texts[index] += piece
                live.update(table())
