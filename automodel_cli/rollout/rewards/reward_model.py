"""Reward model as a reward: its score of the complete conversation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.rollout.rewards.base import OnError, Reward, RewardInput

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class RewardModel(Reward):
    """Score of a reward model for the conversation with its completion (`automodel rm llm` trains one).

    `folder` is a model for `AutoModelForSequenceClassification` with one label, and its tokenizer, which renders
    conversations as in training. The model is loaded once per process, on the device of the process. `dtype` is its
    compute dtype. `chat_template` as in the data section, by default that of the tokenizer. Samples without a score
    are excluded by default (`on_error`), because 0 is not a low score of a reward model.
    """

    on_error: OnError = "skip"
    """Result if the model returns no score. `skip` excludes the sample, because 0 is not a low score here."""

    folder: str
    """Hub id or folder of a sequence classifier with one label, and its tokenizer."""
    dtype: Dtype = "float32"
    """Dtype that the reward model computes in."""
    chat_template: str = "auto"
    """Template of the reward model's conversations, as in `data.chat_template`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ConfigError(
                f"dtype={self.dtype} is no dtype to compute in",
                code="invalid_choice",
                keys=("dtype",),
                fix="dtype=bfloat16",
            )

    def check(self) -> None:
        """Raise ConfigError if the folder is not a reward model. Otherwise all samples would be excluded."""
        from automodel_cli.models.checkpoint_io.sequence_classifier import check_classifier

        check_classifier(self.folder)

    def warm_up(self) -> None:
        self._judge()

    def score(self, sample: RewardInput) -> float:
        return self._judge()([*sample.messages, {"role": "assistant", "content": sample.completion}])

    def _judge(self) -> Callable[[list[dict[str, object]]], float]:
        return _loaded(self.folder, self.dtype, self.chat_template)


@functools.cache
def _loaded(folder: str, dtype: str, chat_template: str) -> Callable[[list[dict[str, object]]], float]:
    """From messages to their score."""
    import torch
    from transformers import AutoTokenizer

    from automodel_cli.data.chat.chat_template import resolve_chat_template
    from automodel_cli.data.encoding.encode_spec import EncodeSpec
    from automodel_cli.data.encoding.row_encoder import RowEncoder
    from automodel_cli.data.formats.builtin import FORMATS
    from automodel_cli.data.row_errors import RowError
    from automodel_cli.data.tokenized import Encoded, as_ids
    from automodel_cli.models.checkpoint_io.sequence_classifier import load_classifier

    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    model: torch.nn.Module = load_classifier(folder, getattr(torch, dtype))
    model.to(device).requires_grad_(False)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    template = resolve_chat_template(chat_template, tokenizer)
    spec = EncodeSpec(FORMATS["messages"], {}, template, mask="all", turns="single")
    encoder = RowEncoder(tokenizer, spec)

    def judge(messages: list[dict[str, Any]]) -> float:
        (encoded,) = encoder.encode([{"messages": messages}])
        match encoded:
            case Encoded():
                tokens = encoded.ids
            case RowError() if template is not None and not messages[-1]["content"].strip():
                # the text comes from the model, not from a dataset, so it must not raise
                ids: Any = tokenizer.apply_chat_template(messages, chat_template=template, return_dict=False)
                tokens = as_ids(ids)
            case RowError():
                raise ValueError(f"the conversation cannot be rendered: {encoded.message}")
            case _:
                raise ValueError("the conversation cannot be rendered: it is no single document")
        ids_1T = torch.from_numpy(tokens)[None].long().to(device)
        with torch.no_grad():
            return float(model(input_ids=ids_1T, use_cache=False).logits[0, 0].float())

    return judge
