"""Chat with trained models in the terminal, based on `generate` of transformers."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    TextIteratorStreamer,
)

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.plain_text import visible
from automodel_cli.data.config import DataConfig
from automodel_cli.data.pictures.content import read_picture, rgb
from automodel_cli.data.row_errors import RowError
from automodel_cli.distributed.device_threads import on_this_device
from automodel_cli.models import transformers_compat
from automodel_cli.models.vision import processor_compat

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_HELP = "/new starts a new conversation, /quit or Ctrl-D exits"
_PICTURE_HELP = "/image PATH adds a picture to the next message, "


@dataclass
class Speaker:
    """One model with the conversation as it has gone with it. `processor`: of a model that reads pictures."""

    name: str
    model: Any
    tokenizer: PreTrainedTokenizerBase
    messages: list[dict[str, Any]]
    processor: Any = None
    pictures: list[object] = field(default_factory=list)

    @classmethod
    def load(cls, name: str, folder: str, *, adapter: Path | None = None, trust_remote_code: bool = False) -> Speaker:
        """Load a folder or hub id with `transformers`. With `adapter`, add unmerged adapters."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        with transformers_compat.quiet():
            kind = None if trust_remote_code else type(AutoConfig.from_pretrained(folder))
            reads_pictures = kind is not None and kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            is_text_model = not reads_pictures and (kind is None or kind in MODEL_FOR_CAUSAL_LM_MAPPING)
            auto: Any = AutoModelForCausalLM if is_text_model else AutoModelForImageTextToText
            model: Any = auto.from_pretrained(folder, dtype="auto", trust_remote_code=trust_remote_code)
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
            config = AutoConfig.from_pretrained(adapter.parent, trust_remote_code=trust_remote_code)
            num_rows = config.get_text_config().vocab_size
            if num_rows != model.config.get_text_config().vocab_size:  # with the rows of new tokens
                model.resize_token_embeddings(num_rows, mean_resizing=False)
            with warnings.catch_warnings():  # peft 0.21 reads the name that transformers 5.24 deprecates
                warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
                model = PeftModel.from_pretrained(model, str(adapter))
            model.to(device)
        of = folder if adapter is None else adapter.parent
        tokenizer = AutoTokenizer.from_pretrained(of, trust_remote_code=trust_remote_code)
        return cls(name, model.eval(), tokenizer, [], _processor(folder, tokenizer) if reads_pictures else None)

    def forget(self) -> None:
        """Start a new conversation."""
        self.messages.clear()
        self.pictures.clear()

    def answer(self, question: str, options: dict[str, object], pictures: Sequence[object] = ()) -> Iterator[str]:
        """Yield the pieces of the response as they arrive, then add it to the conversation. `pictures`: RGB, shown
        before the question."""
        parts = [{"type": "image"} for _ in pictures]
        content: object = [*parts, {"type": "text", "text": question}] if pictures else question
        self.messages.append({"role": "user", "content": content})
        self.pictures += pictures
        inputs = {name: value.to(self.model.device) for name, value in self._inputs(question).items()}
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

    def _inputs(self, question: str) -> dict[str, torch.Tensor]:
        """Return the keywords of the model for the conversation."""
        if not self.pictures:
            if self.tokenizer.chat_template:
                encoded: Any = self.tokenizer.apply_chat_template(
                    self.messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
                )
            else:
                encoded = self.tokenizer(question, return_tensors="pt")
            return {name: encoded[name] for name in ("input_ids", "attention_mask")}
        rendered = self.processor.apply_chat_template(self.messages, add_generation_prompt=True, tokenize=False)
        encoded = self.processor(text=[rendered], images=[self.pictures], add_special_tokens=False, return_tensors="pt")
        dtype = self.model.dtype
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in encoded.items()}


def _processor(folder: str, tokenizer: PreTrainedTokenizerBase) -> object:
    """Return the processor beside the weights with the chat template of the tokenizer, None if there is none."""
    try:
        with transformers_compat.quiet():
            processor = processor_compat.images_only_processor(folder, None, tokenizer)
    except Exception:  # processors raise any class, for packages and for files; `load_pictures` reports it
        return None
    processor.chat_template = processor.chat_template or tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template or processor.chat_template
    return processor


def load_pictures(speakers: Sequence[Speaker], paths: Sequence[str], key: str = "--image") -> list[object]:
    """Return RGB pictures of these files, as training reads them.

    Raises ConfigError if a file is no picture, or if a model reads no pictures. `key`: name of the option for errors.
    """
    for speaker in speakers:
        if paths and (speaker.processor is None or not speaker.processor.chat_template):
            lack = "image processor" if speaker.processor is None else "chat template"
            raise ConfigError(
                f"{key} requires a vision-language model, but {speaker.name} ({type(speaker.model).__name__}) has no "
                f"{lack}",
                code="wrong_model_kind",
                keys=(key,),
                fix="a run of `automodel finetune vlm`, or a vision-language model with its processor",
            )
    try:
        found = [read_picture(path, "", DataConfig.max_image_pixels) for path in paths]
    except RowError as error:
        raise ConfigError(f"{key}: {error.message}", code="unreadable_file", keys=(key,)) from error
    return [rgb(picture.content()) for picture in found]


def converse(
    speakers: list[Speaker],
    options: dict[str, object],
    read: Callable[[], str] | None = None,
    *,
    one_conversation: bool = True,
    pictures: Sequence[object] = (),
) -> int:
    """Read questions from the terminal (or a pipe, one per line) until it ends. Show responses of several models side
    by side. Without `one_conversation`, each question starts a new conversation. The first message of every
    conversation shows `pictures`."""
    picture_help = _PICTURE_HELP if all(speaker.processor is not None for speaker in speakers) else ""
    hint = f"   ({picture_help}{_HELP})" if one_conversation else ""
    print(f"{' | '.join(speaker.name for speaker in speakers)}{hint}")
    shown = list(pictures)
    while True:
        try:
            question = (read or _ask)()
        except (EOFError, KeyboardInterrupt):
            return 0
        if question in ("/quit", "/exit"):
            return 0
        if question == "/new" or not one_conversation:
            shown = list(pictures)
            for speaker in speakers:
                speaker.forget()
        if picture_help and question.startswith("/image "):
            shown += _added(speakers, question.removeprefix("/image ").strip())
        elif question != "/new" and question.strip():
            if len(speakers) == 1:
                _stream(speakers[0], question, options, shown)
            else:
                _show_columns(speakers, question, options, shown)
            shown = []


def _added(speakers: Sequence[Speaker], path: str) -> list[object]:
    """Return the picture of this file. Print the error if there is none."""
    try:
        return load_pictures(speakers, [path], "/image")
    except ConfigError as error:
        print(error.message)
        return []


def _ask() -> str:
    question = input("> " if sys.stdin.isatty() else "")
    if not sys.stdin.isatty():
        print(f"> {question}")
    return question


def _stream(speaker: Speaker, question: str, options: dict[str, object], pictures: Sequence[object]) -> None:
    for piece in speaker.answer(question, options, pictures):
        print(piece, end="", flush=True)
    print()


def _show_columns(
    speakers: list[Speaker], question: str, options: dict[str, object], pictures: Sequence[object]
) -> None:
    """Show one column per model, redrawn as pieces arrive, or plain blocks without a terminal."""
    if not sys.stdout.isatty():
        for speaker in speakers:
            print(f"[{speaker.name}] {''.join(speaker.answer(question, options, pictures))}")
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
            for piece in speaker.answer(question, options, pictures):
                texts[index] += piece
                live.update(table())
