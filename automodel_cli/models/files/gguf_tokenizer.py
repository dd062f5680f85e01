"""Word splitting of tokenizers in GGUF files, which name it by `tokenizer.ggml.pre`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.files.gguf_header import gguf_strings

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer
    from transformers import PreTrainedTokenizerBase


def gguf_path(source: str, gguf_file: str, revision: str | None) -> Path:
    """Return the local GGUF file: in the folder, or in the hub's cache, where reading the tokenizer has stored it."""
    local = Path(source) / gguf_file
    if local.is_file():
        return local
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(source, gguf_file, revision=revision))


# `tokenizer.ggml.pre` names how text is cut into words before the merges. These cut every digit off by itself first,
# then as GPT-2 does (llama.cpp, src/llama-vocab.cpp: LLAMA_VOCAB_PRE_TYPE_SMOLLM and its neighbours).
_DIGITS_ALONE = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_AS_GPT2 = frozenset({"gpt-2", "phi-2", "mpt", "olmo", "jais"})


def set_gguf_split(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Set the word splitting that the model was trained with.

    transformers knows some values of `tokenizer.ggml.pre` and uses GPT-2 for the others, which tokenizes numbers of
    SmolLM incorrectly. Unverified fallbacks are rejected.
    """
    strings = gguf_strings(path)
    if strings.get("tokenizer.ggml.model") != "gpt2":
        return  # only byte-level BPE is cut into words by a named rule
    rule = strings.get("tokenizer.ggml.pre", "missing")
    if rule in _DIGITS_ALONE:
        tokenizer.backend_tokenizer.pre_tokenizer = digits_then_words()
    elif rule not in _AS_GPT2:
        cut = json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"]
        if cut["type"] == "ByteLevel" and cut["use_regex"]:
            raise ConfigError(
                f"gguf_file={path.name} is not supported because its pre-tokenizer {rule!r} (tokenizer.ggml.pre) is "
                "unknown. Numbers and punctuation could be tokenized differently from training",
                code="not_supported",
                keys=("gguf_file",),
                fix="model.tokenizer=<hub id or folder of the original model>",
            )


def digits_then_words() -> PreTokenizer:
    """Split single digits, then GPT-2's words with the preceding space, as bytes."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)])
