"""23 chat templates with the behaviour of those on the hub: their text, the tokens that end generation, and by hand
what a model has to say for an answer, with and without reasoning, and for a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from tests.unit.data.helpers import tiny_tokenizer

FOLDER = Path(__file__).parents[2] / "templates"
SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|START_OF_TURN_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
    "<|USER_TOKEN|>",
    "<|CHATBOT_TOKEN|>",
    "<|SYSTEM_TOKEN|>",
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<eos>",
    "[gMASK]",
    "<sop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|call|>",
    "<|return|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
]
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Tokens of their own that `skip_special_tokens` keeps, as in Qwen's and GLM's tokenizers."""

Said = Callable[[str, str], str]
"""Reasoning ('' for none) and answer to what the model has to say after the generation prompt."""


@dataclass(frozen=True)
class Family:
    """`call` is said for the call of `look(at="hill")`. `stops`: `eos_token_id` of its generation_config."""

    file: str
    eos: str
    answer: Said
    call: str = ""
    options: dict[str, str] = field(default_factory=dict)
    stops: tuple[str, ...] = ()

    @property
    def template(self) -> str:
        head = "".join(f"{{%- set {key} = {value} %}}" for key, value in self.options.items())
        return head + (FOLDER / f"{self.file}.jinja").read_text(encoding="utf-8")

    def tokenizer(self) -> PreTrainedTokenizerFast:
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(_backend()), bos_token="<s>", eos_token=self.eos, pad_token=self.eos
        )
        tokenizer.chat_template = self.template
        return tokenizer

    def stop_ids(self, tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
        return tuple(tokenizer.convert_tokens_to_ids(list(self.stops)))


@cache
def _backend() -> str:
    backend = tiny_tokenizer(None).backend_tokenizer
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in NOT_SPECIAL])
    return backend.to_str()


def _plain(end: str) -> Said:
    return lambda thought, said: said + end


def _qwen3(thought: str, said: str) -> str:
    return f"<think>\n{thought}\n</think>\n\n{said}<|im_end|>"


def _after_think(thought: str, said: str) -> str:
    return f"{thought}\n</think>\n\n{said}<|im_end|>"


def _nemotron(closing: str) -> Said:
    return lambda thought, said: (thought + closing if thought else "</think>") + said + "<|im_end|>"


def _gpt_oss(thought: str, said: str) -> str:
    analysis = f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant" if thought else ""
    return f"{analysis}<|channel|>final<|message|>{said}<|return|>"


_JSON_CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "hill"}}\n</tool_call><|im_end|>'
_XML_CALL = "<tool_call>\n<function=look>\n<parameter=at>\nhill\n</parameter>\n</function>\n</tool_call>"
_LLAMA = {"file": "llama3_1", "eos": "<|eot_id|>", "answer": _plain("<|eot_id|>")}
_LLAMA_CALL = '{"name": "look", "parameters": {"at": "hill"}}<|eot_id|>'
_OPENED, _EMPTY = "'<think>\\n'", "'<think>\\n\\n</think>\\n\\n'"
_IM_END = {"eos": "<|im_end|>"}
_PHI = {"file": "phi_3", "eos": "<|endoftext|>", "answer": _plain("<|end|>"), "stops": ("<|endoftext|>", "<|end|>")}
_NANO_CALL = f"</think>\n{_XML_CALL}\n<|im_end|>"
_NANO = {"file": "nemotron_3", "answer": _nemotron("\n</think>\n"), "call": _NANO_CALL, **_IM_END}

FAMILIES: dict[str, Family] = {
    "cohere": Family("cohere", "<|END_OF_TURN_TOKEN|>", _plain("<|END_OF_TURN_TOKEN|>")),
    "cohere2": Family("cohere2", "<|END_OF_TURN_TOKEN|>", _plain("<|END_RESPONSE|><|END_OF_TURN_TOKEN|>")),
    "deepseek-v3": Family(
        "deepseek",
        "<｜end▁of▁sentence｜>",
        lambda thought, said: f"{thought}\n</think>\n\n{said}<｜end▁of▁sentence｜>",
    ),
    "gemma": Family("gemma", "<eos>", _plain("<end_of_turn>"), "", {"system": "false"}, ("<eos>", "<end_of_turn>")),
    "gemma-3": Family("gemma", "<eos>", _plain("<end_of_turn>"), "", {"system": "true"}, ("<eos>", "<end_of_turn>")),
    "glm-4.5": Family(
        "glm4_5",
        "<|endoftext|>",
        lambda thought, said: f"\n<think>{thought}</think>\n{said}<|user|>",
        "\n<think></think>\n<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>hill</arg_value>\n</tool_call>"
        "<|observation|>",
        stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    "gpt-oss": Family(
        "gpt_oss",
        "<|return|>",
        _gpt_oss,
        ' to=functions.look<|channel|>commentary json<|message|>{"at": "hill"}<|call|>',
        stops=("<|return|>", "<|endoftext|>", "<|call|>"),
    ),
    "lfm2": Family("lfm2", answer=_plain("<|im_end|>"), **_IM_END),
    "lfm2.5": Family(
        "lfm2_5",
        answer=lambda thought, said: (f"<think>{thought}</think>" if thought else "") + said + "<|im_end|>",
        call="<|tool_call_start|>[look(at='hill')]<|tool_call_end|><|im_end|>",
        **_IM_END,
    ),
    "llama-3": Family("llama3", "<|eot_id|>", _plain("<|eot_id|>")),
    "llama-3.1": Family(call=_LLAMA_CALL, options={"date": "'26 Jul 2024'"}, **_LLAMA),
    "llama-3.2": Family(call=_LLAMA_CALL, options={"date": "none"}, **_LLAMA),
    "nemotron-3-nano": Family(options={"closing": "'\\n</think>\\n'"}, **_NANO),
    "nemotron-3-super": Family(options={"closing": "'\\n</think>\\n'"}, **_NANO),
    "nemotron-3-ultra": Family(options={"closing": "'</think>'"}, **{**_NANO, "answer": _nemotron("</think>")}),
    "phi-3": Family(options={"empty_system": "true"}, **_PHI),
    "phi-3.5": Family(options={"empty_system": "false"}, **_PHI),
    "qwen2.5": Family(
        "qwen2_5", answer=_plain("<|im_end|>"), call=_JSON_CALL, options={"preamble": "'You are Qwen.'"}, **_IM_END
    ),
    "qwen3": Family("qwen3", answer=_qwen3, call="<think>\n\n</think>\n\n" + _JSON_CALL, **_IM_END),
    "qwen3-2507": Family(
        "qwen2_5", answer=_plain("<|im_end|>"), call=_JSON_CALL, options={"preamble": "''"}, **_IM_END
    ),
    "qwen3.5": Family(
        "qwen3_5",
        answer=_after_think,
        call=f"\n</think>\n\n{_XML_CALL}<|im_end|>",
        options={"cue": _OPENED, "values_as_json": "false"},
        **_IM_END,
    ),
    "qwen3.5-nothink": Family(
        "qwen3_5",
        answer=_plain("<|im_end|>"),
        call=f"{_XML_CALL}<|im_end|>",
        options={"cue": _EMPTY, "values_as_json": "false"},
        **_IM_END,
    ),
    "qwen3.6": Family(
        "qwen3_5",
        answer=_after_think,
        call=f"\n</think>\n\n{_XML_CALL}<|im_end|>",
        options={"cue": _OPENED, "values_as_json": "true"},
        **_IM_END,
    ),
}
