"""Rows with pictures to tokens and labels: formats, tags, counts, and the tokens that are trained."""

from __future__ import annotations

import numpy as np
import pytest

from automodel_cli.data.encoding.encode_spec import EncodeSpec
from automodel_cli.data.encoding.row_encoder import RowEncoder
from automodel_cli.data.formats.builtin import FORMATS, detect_format
from automodel_cli.data.pictures.reader import PictureSupport
from automodel_cli.data.pictures.rows import PictureRows
from automodel_cli.data.row_errors import RowError
from automodel_cli.data.tokenized import Encoded
from automodel_cli.models.vision.processor import FamilyProcessor
from tests.errors import assert_error, raises
from tests.vision import config_of, encoded, noise, processor_of

SIZES = ((16, 24), (16, 16), (24, 16))
FILES = [encoded(noise(*size, seed=number)) for number, size in enumerate(SIZES)]
PLACEHOLDER, START, STOP, END = 2, 3, 4, 1


def encode(row: dict, fmt: str | None = None, *, columns: dict[str, str] | None = None) -> Encoded:
    library = processor_of("qwen3_vl")
    tokenizer = library.tokenizer
    support = PictureSupport(PictureRows("", 10**6), FamilyProcessor(library, config_of("qwen3_vl")))
    columns = columns or {}
    found = FORMATS[fmt] if fmt else detect_format([row], columns, "rows")
    spec = EncodeSpec(found, columns, tokenizer.chat_template, "assistant")
    (result,) = RowEncoder(tokenizer, spec, support).encode([row])
    if isinstance(result, RowError):
        raise result
    assert isinstance(result, Encoded)
    return result


def chat(*contents: object) -> list[dict]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def image(number: int) -> dict:
    return {"type": "image", "bytes": FILES[number]}


def text(words: str) -> dict:
    return {"type": "text", "text": words}


def _without_bytes(content: str | list) -> str | list:
    return content if isinstance(content, str) else [{k: v for k, v in p.items() if k != "bytes"} for p in content]


FIVE_TURNS = [
    {"role": "system", "content": "short"},
    {"role": "user", "content": [image(0), text("and"), image(1), text("what")]},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": [text("and here"), image(2)]},
    {"role": "assistant", "content": [text("one")]},
]


def test_tokens_are_those_of_the_processor_and_only_answers_are_trained():
    library = processor_of("qwen3_vl")
    turns = FIVE_TURNS[1:]
    result = encode({"messages": turns})
    shown = [{**turn, "content": _without_bytes(turn["content"])} for turn in turns]
    prompt = library.tokenizer.apply_chat_template(shown, tokenize=False)
    images = [noise(*size, seed=number) for number, size in enumerate(SIZES)]
    want = library(text=[prompt], images=[images], add_special_tokens=False)["input_ids"][0]
    assert result.ids.tolist() == list(want)
    trained = result.ids[result.trained != 0].tolist()
    assert trained == [*library.tokenizer("two")["input_ids"], END, *library.tokenizer("one")["input_ids"], END]
    assert not {PLACEHOLDER, START, STOP} & set(trained)
    assert [picture.height for picture in result.pictures] == [16, 16, 24]


def test_a_picture_in_an_answer_must_not_be_trained():
    turns = chat("what is here", [text("a"), image(0)], "and", "one")
    with raises(RowError, "picture_in_answer", values=(1,)):
        encode({"messages": turns})
    turns[1]["train"] = False
    result = encode({"messages": turns})
    assert len(result.pictures) == 1 and not result.trained[result.ids == PLACEHOLDER].any()


@pytest.mark.parametrize(
    ("row", "columns"),
    [
        ({"messages": chat([image(0), text("what is")], "one")}, {}),
        ({"messages": chat("<image>\nwhat is", "one"), "images": [{"bytes": FILES[0], "path": None}]}, {}),
        ({"messages": chat([{"type": "image"}, text("what is")], "one"), "images": [{"bytes": FILES[0]}]}, {}),
        ({"prompt": "<image>what is", "completion": "one", "image": {"bytes": FILES[0]}}, {}),
        (
            {"messages": chat("<image>\nwhat is", "one"), "photos": [{"bytes": FILES[0]}], "n": 1},
            {"images": "photos"},
        ),
        (
            {"ask": "<image>what is", "say": "one", "photo": {"bytes": FILES[0]}},
            {"prompt": "ask", "completion": "say", "images": "photo"},
        ),
        ({"instruction": "<image>\nwhat is", "output": "one", "images": [{"bytes": FILES[0]}]}, {}),
        (
            {
                "conversations": [{"from": "human", "value": "<image>\nwhat is"}, {"from": "gpt", "value": "one"}],
                "image": {"bytes": FILES[0]},
            },
            {},
        ),
    ],
)
def test_all_formats_give_the_same_document(row: dict, columns: dict[str, str]):
    want = encode({"messages": chat([image(0), text("what is")], "one")})
    got = encode(row, columns=columns)
    assert np.array_equal(got.ids, want.ids)
    assert np.array_equal(got.trained, want.trained)
    assert [picture.key for picture in got.pictures] == [picture.key for picture in want.pictures]


def test_without_pictures_a_tag_is_text():
    result = encode({"messages": chat("what is <image> here", "one")})
    assert PLACEHOLDER not in result.ids and not result.pictures


def test_a_typed_placeholder_is_no_picture():
    """A tokenizer of whole words cannot spell it, so the row is refused."""
    with raises(RowError, "special_token"):
        encode({"messages": chat([image(0), text("what is <|image_pad|>")], "one")})


@pytest.mark.parametrize(
    ("row", "code"),
    [
        ({"messages": chat("<image><image> what", "one"), "images": [{"bytes": FILES[0]}]}, "image_count"),
        ({"messages": chat("<image> what", "one"), "images": [{"bytes": FILES[0]}] * 2}, "image_count"),
        ({"messages": chat("what", "one"), "images": [{"bytes": FILES[0]}]}, "image_count"),
        ({"messages": chat([image(0), {"type": "video", "video": "a.mp4"}], "one")}, "not_text"),
        ({"messages": chat("what \U0010e000", "one")}, "bad_text"),
        ({"messages": chat([{"type": "image", "path": "missing.png"}], "one")}, "no_picture"),
        ({"text": "<image> a", "images": [{"bytes": FILES[0]}]}, "no_template"),
    ],
)
def test_wrong_rows_are_refused(row: dict, code: str):
    with pytest.raises(RowError) as caught:
        encode(row)
    assert_error(caught.value, code)


def test_the_error_names_the_picture():
    with pytest.raises(RowError, match=r"images\[1\]"):
        encode({"messages": chat("<image><image>", "one"), "images": [{"bytes": FILES[0]}, "missing.png"]})


PROMPT = [{"role": "user", "content": [image(0), text("and"), image(1), text("what")]}]
ONE, TWO = ({"role": "assistant", "content": word} for word in ("one", "two"))


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": PROMPT, "chosen": [ONE], "rejected": [TWO]},
        {"prompt": PROMPT, "chosen": "one", "rejected": "two"},
        {"chosen": [*PROMPT, ONE], "rejected": [*PROMPT, TWO]},
        {"prompt": "<image>and<image>what", "chosen": "one", "rejected": "two", "images": FILES[:2]},
        {
            "chosen": [{"role": "user", "content": "<image>and<image>what"}, ONE],
            "rejected": [{"role": "user", "content": "<image>and<image>what"}, TWO],
            "images": FILES[:2],
        },
    ],
    ids=["messages", "texts", "two conversations", "tags", "two conversations with tags"],
)
def test_both_responses_of_a_pair_show_the_pictures_of_the_prompt(row: dict):
    result = encode(row, "preference")
    wanted = [encode({"messages": [*PROMPT, answer]}) for answer in (ONE, TWO)]
    assert result.ids.tolist() == [token for of in wanted for token in of.ids.tolist()]
    assert result.trained.tolist() == [flag for of in wanted for flag in of.trained.tolist()]
    assert result.split == len(wanted[0].ids)
    assert [picture.key for picture in result.pictures] == [picture.key for of in wanted for picture in of.pictures]
    assert result.num_first_pictures == 2


def test_the_prompt_of_a_judged_response_keeps_its_pictures():
    result = encode({"prompt": PROMPT, "completion": [ONE], "label": True}, "unpaired_preference")
    assert (len(result.pictures), result.num_first_pictures) == (4, 2)  # the reference point shows the prompt too


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (
            {"prompt": "what", "chosen": [{"role": "assistant", "content": [image(0)]}], "rejected": "two"},
            "picture_in_answer",
        ),
        ({"prompt": "<image>what", "chosen": "one", "rejected": "two", "images": FILES[:2]}, "image_count"),
        ({"prompt": "<image>what", "chosen": "one", "rejected": "<image>", "images": FILES[:1]}, "image_count"),
        (
            {
                "chosen": [{"role": "user", "content": [image(0)]}, ONE],
                "rejected": [{"role": "user", "content": [image(1)]}, TWO],
            },
            "no_prompt",
        ),
    ],
    ids=["picture as answer", "picture without tag", "tag without picture", "other pictures"],
)
def test_pairs_whose_pictures_are_not_in_the_prompt_are_refused(row: dict, code: str):
    with raises(RowError, code):
        encode(row, "preference")
