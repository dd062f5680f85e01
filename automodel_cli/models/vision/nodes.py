"""Tokenizer and processor made in code, for vision-language models with random weights. Torch-free at import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from automodel_cli.data.synthetic.picture_tasks import WORDS

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, END, START, STOP, IMAGE = "<|pad|>", "<|end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"
_ROLES = ("user", "assistant")
_TEMPLATE = (
    "{%- for message in messages -%}{{- '<|' ~ message['role'] ~ '|>' -}}"
    "{%- if message['content'] is string -%}{%- set parts = [{'type': 'text', 'text': message['content']}] -%}"
    "{%- else -%}{%- set parts = message['content'] -%}{%- endif -%}"
    "{%- for part in parts -%}"
    "{%- if part['type'] == 'image' -%}{{- '"
    + START
    + IMAGE
    + STOP
    + "' -}}{%- else -%}{{- part['text'] -}}{%- endif -%}"
    "{%- endfor -%}{{- '<|end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


@dataclass(frozen=True)
class WordTokenizer:
    """Tokenizer with one token for each word, and a chat template with pictures.

    Words are separated by spaces. Other words are the token `<|unknown|>`.
    """

    words: tuple[str, ...] = WORDS
    """Words of the vocabulary."""

    def build(self) -> PreTrainedTokenizerFast:
        """Return a fast tokenizer that `save_pretrained` writes and `AutoTokenizer` reads."""
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        special = [PAD, END, IMAGE, START, STOP, "<|video_pad|>", *(f"<|{role}|>" for role in _ROLES), "<|unknown|>"]
        vocab = {token: i for i, token in enumerate(dict.fromkeys([*special, *self.words]))}
        tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<|unknown|>"))  # not a password
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token=PAD,
            eos_token=END,
            unk_token="<|unknown|>",
            extra_special_tokens=special[2:-1],
            clean_up_tokenization_spaces=False,
        )
        fast.chat_template = _TEMPLATE
        return fast


def image_tokenizer(ids: dict[str, int]) -> PreTrainedTokenizerFast:
    """Return a tokenizer that knows these tokens only, with their ids in a published model."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    unknown = "<|unknown|>"  # not a password
    tokenizer = Tokenizer(models.WordLevel({unknown: 0, **ids}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=unknown, extra_special_tokens=list(ids))


@dataclass(frozen=True)
class QwenProcessor:
    """Processor of Qwen3-VL: pictures are resized to multiples of `patch_size * merge_size`."""

    patch_size: int = 16
    """Side of a patch [pixels]."""
    merge_size: int = 2
    """Patches of a token along each side."""
    temporal_patch_size: int = 2
    """Copies of a picture along time."""
    min_pixels: int = 65_536
    """Smaller pictures are enlarged."""
    max_pixels: int = 16_777_216
    """Larger pictures are reduced."""

    def build_processor(self, tokenizer: PreTrainedTokenizerBase) -> object:
        """Return a processor of transformers around this tokenizer."""
        from transformers import Qwen2VLImageProcessorPil, Qwen3VLProcessor

        from automodel_cli.models.vision.processor_compat import without_video

        settings: dict[str, Any] = {
            "patch_size": self.patch_size,
            "merge_size": self.merge_size,
            "temporal_patch_size": self.temporal_patch_size,
            "size": {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
        }
        video = {"video_processor_type": "Qwen3VLVideoProcessor", **settings}
        return without_video(Qwen3VLProcessor, video)(
            image_processor=Qwen2VLImageProcessorPil(**settings),
            tokenizer=tokenizer,
            chat_template=tokenizer.chat_template,
        )


@dataclass(frozen=True)
class GemmaProcessor:
    """Processor of Gemma 3: pictures are resized to a square, and all have the same number of tokens."""

    image_size: int = 896
    """Side of the square [pixels]."""
    num_tokens: int = 256
    """Tokens of a picture, `mm_tokens_per_image` of the model."""

    def build_processor(self, tokenizer: PreTrainedTokenizerBase) -> object:
        """Return the processor of transformers around this tokenizer, whose template then writes the begin token."""
        from transformers import Gemma3ImageProcessorPil, Gemma3Processor

        from automodel_cli.models.vision.processor_compat import name_special_tokens

        name_special_tokens(tokenizer, {"boi_token": START, "eoi_token": STOP, "image_token": IMAGE})
        if tokenizer.chat_template is not None:
            tokenizer.chat_template = tokenizer.chat_template.replace(IMAGE + STOP, "")  # the processor adds them
        side = {"height": self.image_size, "width": self.image_size}
        return Gemma3Processor(
            image_processor=Gemma3ImageProcessorPil(size=side),
            tokenizer=tokenizer,
            image_seq_length=self.num_tokens,
            chat_template=tokenizer.chat_template,
        )
