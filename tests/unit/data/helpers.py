"""A tiny tokenizer with several chat templates, and files of rows, for the data tests."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

NATIVE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_BOS = "{{ bos_token }}" + NATIVE
FORGETS_REASONING = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Drops reasoning from every assistant turn but the last, as Qwen3's template does."""

WITH_TOOLS = "{% if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}" + NATIVE
NO_SYSTEM = "{% for m in messages if m['role'] != 'system' %}" + NATIVE.partition("{% for m in messages %}")[2]


@cache
def _backend() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["a small text about chat templates and the answer is seven"] * 10, trainer)
    return tokenizer.to_str()


def tiny_tokenizer(template: str | None = NATIVE, *, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 400 tokens; `adds_bos` puts `<s>` in front of texts, as Llama's tokenizers do."""
    backend = Tokenizer.from_str(_backend())
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    """One OpenAI message."""
    return {"role": role, "content": content, **more}


def chat_row(*contents: str) -> dict[str, Any]:
    """A conversation of alternating user and assistant messages."""
    return {"messages": [turn("assistant" if i % 2 else "user", text) for i, text in enumerate(contents)]}


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    """One JSON object per line; rows that are text are written as they are."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def trained_text(tokenizer: Any, encoded: Any) -> str:
    """What the model would learn to say: the trained tokens decoded."""
    return tokenizer.decode([i for i, flag in zip(encoded.ids.tolist(), encoded.trained, strict=True) if flag])
