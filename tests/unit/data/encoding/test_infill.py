"""Documents with moved middles against the definition of the paper (arXiv:2207.14255), and their path to batches."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.encoding.encode_spec import EncodeSpec
from automodel_cli.data.encoding.infill import CONVENTIONS, anchored, resolve_infill
from automodel_cli.data.encoding.row_encoder import RowEncoder
from automodel_cli.data.fill_in_the_middle import FillInTheMiddle
from automodel_cli.data.formats.builtin import FORMATS
from automodel_cli.data.preparation.pipeline import prepare_data
from automodel_cli.data.preparation.preview import head_problems
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.sources import spans
from automodel_cli.data.token_files import megatron
from tests.errors import raises
from tests.unit.data.helpers import chat_row, tiny_tokenizer, write_jsonl

QWEN = CONVENTIONS[0]


def tokenizer_with(names: tuple[str | None, ...] = QWEN, **options: Any) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer(**options)
    tokenizer.add_tokens([name for name in names if name is not None], special_tokens=True)
    return tokenizer


def sentencepiece(scheme: str) -> PreTrainedTokenizerFast:
    """Words and characters, with the marks of SentencePiece for spaces."""
    words = ["<s>", "</s>", "▁", *"abcdefghijklmnopqrstuvwxyz."]
    backend = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.add_tokens([name for name in CONVENTIONS[2] if name is not None], special_tokens=True)
    return tokenizer


def texts(number: int) -> list[str]:
    chosen = random.Random(0)
    return ["".join(chosen.choice("abc xyz\n€") for _ in range(chosen.randrange(3, 90))) for _ in range(number)]


def encoded(
    tokenizer: Any, rows: list[str], config: FillInTheMiddle, most: int | None = None, **more: Any
) -> list[Any]:
    spec = EncodeSpec(FORMATS["text"], {}, None, "assistant", infill=resolve_infill(config, tokenizer, most), **more)
    return RowEncoder(tokenizer, spec).encode([{"text": text} for text in rows])


def parts_of(ids: list[int], marks: list[int]) -> list[list[int]]:
    """The tokens between the marks, which must occur once each and in this order."""
    places = [ids.index(mark) for mark in marks]
    assert places == sorted(places) and all(ids.count(mark) == 1 for mark in marks) and places[0] == 0
    return [ids[a + 1 : b] for a, b in itertools.pairwise([*places, len(ids)])]


@pytest.mark.parametrize("names", CONVENTIONS)
@pytest.mark.parametrize("mode", ["psm", "spm"])
def test_parts_stand_in_the_order_of_the_paper(names: tuple[str | None, ...], mode: Any) -> None:
    tokenizer, rows = tokenizer_with(names), texts(40)
    marks = dict(
        zip(("pre", "suf", "mid", "end"), tokenizer.convert_tokens_to_ids([n for n in names if n]), strict=False)
    )
    for text, item in zip(rows, encoded(tokenizer, rows, FillInTheMiddle(rate=1.0, mode=mode)), strict=True):
        ids = item.ids.tolist()
        assert item.trained.all() and item.infill == 1 and ids.pop() == tokenizer.eos_token_id
        if "end" in marks:
            assert ids.pop() == marks["end"]
        first, second, third = parts_of(ids, [marks["pre"], marks["suf"], marks["mid"]])
        if mode == "psm":
            prefix, suffix, middle = (tokenizer.decode(part) for part in (first, second, third))
            want = [tokenizer(part)["input_ids"] for part in (prefix, suffix, middle)]
            assert (prefix + middle + suffix, [first, second, third]) == (text, want)
        else:
            assert not first
            assert tokenizer.decode(third) + tokenizer.decode(second) == text


def test_splits_are_uniform_and_their_number_is_the_rate() -> None:
    rows = [f"{number:05d}" + "x" * 995 for number in range(2000)]
    spec = resolve_infill(FillInTheMiddle(rate=0.5, mode="joint"), tokenizer_with(), None)
    found = [split for text in rows if (split := spec.split(text)) is not None]
    assert abs(len(found) - 1000) < 4 * np.sqrt(2000 * 0.25)
    assert abs(sum(split[3] for split in found) - len(found) / 2) < 4 * np.sqrt(len(found) * 0.25)
    lengths = np.array([[len(part) for part in split[:3]] for split in found]) / 1000
    # order statistics of two uniform numbers: each part has mean 1/3 and variance 1/18
    assert np.all(abs(lengths.mean(0) - 1 / 3) < 4 * np.sqrt(1 / 18 / len(found)))
    assert np.all(abs(lengths.var(0) - 1 / 18) < 0.01)


def test_a_split_depends_on_text_and_seed_only() -> None:
    rows, tokenizer = texts(60), tokenizer_with()
    first = encoded(tokenizer, rows, FillInTheMiddle())
    again = encoded(tokenizer, rows[::-1], FillInTheMiddle())[::-1]
    assert all(np.array_equal(a.ids, b.ids) for a, b in zip(first, again, strict=True))
    other = encoded(tokenizer, rows, FillInTheMiddle(seed=1))
    assert any(not np.array_equal(a.ids, b.ids) for a, b in zip(first, other, strict=True))
    assert {item.infill for item in first} == {0, 1}


def test_bos_comes_first_and_long_documents_stay() -> None:
    tokenizer = tokenizer_with(adds_bos=True)
    (item,) = encoded(tokenizer, ["abc"], FillInTheMiddle(rate=1.0))
    assert item.ids[:2].tolist() == [tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids(QWEN[0])]
    most = len(item.ids)
    assert encoded(tokenizer, ["abc"], FillInTheMiddle(rate=1.0), most)[0].infill == 1
    (same,) = encoded(tokenizer, ["abc"], FillInTheMiddle(rate=1.0), most - 1)
    assert same.infill == 2
    assert same.ids.tolist() == [*tokenizer("abc")["input_ids"], tokenizer.eos_token_id]


def test_no_space_is_added_in_front_of_parts() -> None:
    tokenizer, text = sentencepiece("first"), "some words. and more of them"
    assert anchored(tokenizer, resolve_infill(FillInTheMiddle(), tokenizer, None))
    (item,) = encoded(tokenizer, [text], FillInTheMiddle(rate=1.0, seed=3))
    marks = tokenizer.convert_tokens_to_ids(list(CONVENTIONS[2]))
    prefix, suffix, middle = parts_of(item.ids.tolist()[:-2], marks[:3])
    pieces = tokenizer.convert_ids_to_tokens([*prefix, *middle, *suffix])
    assert "".join(pieces).replace("▁", " ") == text
    always = sentencepiece("always")
    with raises(ConfigError, "not_supported_by_model", keys=("data.fill_in_the_middle",)):
        anchored(always, resolve_infill(FillInTheMiddle(), always, None))


def test_tokens_must_exist() -> None:
    fix = 'model.tokenizer.add_special_tokens=\'["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]\''
    with raises(ConfigError, "unknown_name", keys=("data.fill_in_the_middle",), fix=fix):
        resolve_infill(FillInTheMiddle(), tiny_tokenizer(), None)
    own = FillInTheMiddle(prefix_token="<s>", suffix_token="<|im_start|>", middle_token="<none>")
    with raises(ConfigError, "unknown_name", values=("<none>",)):
        resolve_infill(own, tiny_tokenizer(), None)
    with raises(ConfigError, "requires_setting"):
        FillInTheMiddle(prefix_token="<s>")
    with raises(ConfigError, "out_of_range"):
        FillInTheMiddle(rate=1.5)


def prepared(path: Path, cache: str = "cache", **more: Any) -> Any:
    options = {"seq_len": 128, "num_workers": 0, "cache_dir": str(path.parent / cache), **more}
    config = DataConfig(path=str(path), fill_in_the_middle=FillInTheMiddle(), **options)
    return prepare_data(config, tokenizer_with(), seed=0, progress=lambda line: None)


def test_batches_have_the_documents_at_any_division(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [text for text in texts(60) if text.strip()]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": text} for text in rows])
    whole = prepared(path)
    want = encoded(tokenizer_with(), rows, FillInTheMiddle(), 128)
    (store,) = whole.train.stores
    found = {}
    for row in range(len(whole.train)):
        ids, mask, bounds = whole.train.tokens(row)
        lines = [line for _, line in whole.train.documents(row)]
        for line, a, b in zip(lines, bounds[:-1], bounds[1:], strict=True):
            found.setdefault(line, ids[a:b].tolist())
            assert mask[a : b - 1].all() and not mask[b - 1]  # labels do not cross documents
    short = {n: item.ids.tolist() for n, item in enumerate(want, 1) if len(item.ids) <= 128}
    assert {n: found[n] for n in short} == short and len(short) > 40
    moved = sum(item.infill == 1 for item in want)
    assert any(f"fill in the middle: {moved} of {len(rows)} documents" in line for line in whole.report.lines())
    monkeypatch.setattr(spans, "SHARD_BYTES", 500)
    again = prepared(path, "other")
    assert again.train.contents == whole.train.contents
    assert again.report.train[0].infill == whole.report.train[0].infill
    (plain,) = prepare_data(
        DataConfig(path=str(path), seq_len=128, num_workers=0, cache_dir=str(tmp_path / "cache")),
        tokenizer_with(),
        seed=0,
    ).train.stores
    assert plain.content != store.content  # another entry of the cache


def test_other_data_are_rejected(tmp_path: Path) -> None:
    chats = write_jsonl(tmp_path / "chats.jsonl", [chat_row("q", "a")] * 3)
    megatron.write(tmp_path / "tokens.bin", [np.array([1, 2, 3])], np.dtype("uint16"))
    for path in (chats, tmp_path / "tokens.bin"):
        config = DataConfig(path=str(path), fill_in_the_middle=FillInTheMiddle())
        (problem,) = head_problems(config, kind="documents", prompts=False)
        assert problem.code == "wrong_data_kind"
        with raises(DataError, "wrong_data_kind", keys=("data.fill_in_the_middle",)):
            prepared(path)
    code = write_jsonl(tmp_path / "code.jsonl", [{"text": text} for text in texts(20) if text.strip()])
    sources = [SourceConfig(str(code)), SourceConfig(str(chats), fill_in_the_middle=False)]
    options: dict[str, Any] = {"seq_len": 128, "num_workers": 0, "cache_dir": str(tmp_path / "cache")}
    config = DataConfig(datasets=sources, fill_in_the_middle=FillInTheMiddle(rate=1.0), **options)
    assert not list(head_problems(config, kind="documents", prompts=False))
    report = prepare_data(config, tokenizer_with(), seed=0).report
    assert [source.infill.moved > 0 for source in report.train] == [True, False]


@pytest.mark.parametrize("option", ["add_bos", "add_eos"])
def test_texts_with_their_own_ends_are_rejected(option: str) -> None:
    with raises(ConfigError, "unsupported_combination", keys=(option, "fill_in_the_middle")):
        DataConfig(path="a", fill_in_the_middle=FillInTheMiddle(), **{option: False})


def test_settings_that_do_not_fit_are_rejected(tmp_path: Path) -> None:
    with raises(ConfigError, "no_effect", keys=("datasets",)):
        DataConfig(datasets=[SourceConfig("a", fill_in_the_middle=False)])
    for kind in ("preferences", "labeled", "groups"):
        with raises(ConfigError, "wrong_data_kind", keys=("data.fill_in_the_middle",)):
            DataConfig(path="a", fill_in_the_middle=FillInTheMiddle()).check_kind(kind)  # type: ignore[arg-type]
