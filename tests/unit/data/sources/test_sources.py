"""Files as people have them: odd, damaged, in arrays, saved by a library, or plain text."""

from __future__ import annotations

import gzip
import io
import json
import random
import tracemalloc

import pytest

from automodel_cli.config.errors import DataError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.json_array import BLOCK, read_array
from automodel_cli.data.preparation.pipeline import prepare_data
from automodel_cli.data.row_errors import DAMAGED, RowError
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.sources.file_discovery import local_files
from automodel_cli.data.sources.file_readers import read_file
from automodel_cli.data.sources.sources import open_source
from tests.errors import raises
from tests.unit.data.helpers import chat_row, tiny_tokenizer, write_jsonl

GOOD = json.dumps(chat_row("a question", "an answer"))
ODD = {
    "lone_surrogate": (
        '{"messages": [{"role": "user", "content": "half \\ud83d"}, {"role": "assistant", "content": "x"}]}',
        "messages[0].content contains half of a surrogate pair: \\ud83d",
    ),
    "long_number": ('{"text": "x", "n": ' + "7" * 5000 + "}", "an integer has more than 4,300 digits"),
    "too_deep": ('{"text": ' + "[" * 200_000 + "]" * 200_000 + "}", "lists and objects are nested more than 100 deep"),
    "just_too_deep": ('{"text": ' + "[" * 100 + "]" * 100 + "}", "lists and objects are nested more than 100 deep"),
}


@pytest.mark.parametrize("name", ODD)
def test_an_odd_row_is_refused_alone_and_by_its_line(tmp_path, name):
    odd, message = ODD[name]
    lines = write_jsonl(tmp_path / "rows.jsonl", [GOOD, odd, GOOD])
    array = tmp_path / "rows.json"
    array.write_text(f"[{GOOD},\n{odd},\n{GOOD}]")
    for path in (lines, array):
        rows = list(read_file(path))
        assert [number for number, _ in rows] == [1, 2, 3]
        assert rows[0][1] == rows[2][1] == json.loads(GOOD)
        assert rows[1][1].message == message
    config = DataConfig(path=str(lines), seq_len=64, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError) as caught:
        prepare_data(config, tiny_tokenizer(), seed=0)
    assert f"rows.jsonl:2: {message}" in caught.value.message


def test_escaped_pairs_and_a_hundred_levels_are_no_errors(tmp_path):
    deep = "[" * 99 + "]" * 99
    path = write_jsonl(tmp_path / "rows.jsonl", ['{"text": "\\ud83d\\ude00 \\\\ud83d", "x": ' + deep + "}"])
    assert next(read_file(path))[1]["text"] == "\U0001f600 \\ud83d"


def test_odd_json_inside_a_column_is_named_too(tmp_path):
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 9999 + "]" * 9999}}]}
    row = {"messages": [{"role": "user", "content": "x"}, call]}
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    with pytest.raises(DataError, match=r"rows.jsonl:1: messages\[1\].tool_calls\[0\].function.arguments: .* 100 deep"):
        prepare_data(DataConfig(path=str(path), cache_dir=str(tmp_path / "cache")), tiny_tokenizer(), seed=0)


@pytest.mark.parametrize("indent", [2, "\t"])
def test_a_pretty_printed_object_is_one_refused_row(tmp_path, indent):
    pretty = json.dumps(json.loads(GOOD), indent=indent)
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{GOOD}\n{pretty}\n{GOOD}\n")
    rows = list(read_file(path))
    last = 1 + len(pretty.splitlines())
    assert [number for number, _ in rows] == [1, 2, last + 1]
    assert rows[1][1].message == f"not JSON on one line: an object spans lines 2 to {last}"
    assert "jq -c ." in rows[1][1].fix


def test_an_opening_bracket_that_nothing_closes_swallows_no_row(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{{\n{GOOD}\n{GOOD}\n")
    assert [(n, isinstance(row, RowError)) for n, row in read_file(path)] == [(1, True), (2, False), (3, False)]


@pytest.mark.parametrize("damage", ["cut", "checksum", "foreign"])
def test_damaged_gzip_is_named_by_its_line_and_never_dropped(tmp_path, damage):
    rng = random.Random(0)
    rows = [chat_row("q", "".join(rng.choices("abcdefgh ", k=400))) for _ in range(2000)]
    packed = bytearray(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    if damage == "cut":
        packed = packed[: len(packed) // 2]
    elif damage == "checksum":
        packed[-8] ^= 1  # of the checksum
    else:
        packed = bytearray(b"no gzip at all")
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(packed)
    read = list(read_file(path))
    assert [row for _, row in read[:-1]] == rows[: len(read) - 1]
    number, error = read[-1]
    assert (number, error.code) == (len(read), DAMAGED)
    assert damage == "foreign" or number > 300
    config = DataConfig(
        path=str(path), on_invalid_row="drop", max_invalid_fraction=1.0, cache_dir=str(tmp_path / "cache")
    )
    with pytest.raises(DataError, match=f"rows.jsonl.gz:{number}: the gzip data is damaged"):
        prepare_data(config, tiny_tokenizer(), seed=0)


# -- arrays


def pieces(content: str | bytes) -> list:
    content = content.encode() if isinstance(content, str) else content
    return [row for _, row in read_array(io.BytesIO(content))]


@pytest.mark.parametrize("block", [1, 2, 7, 64])
@pytest.mark.parametrize("indent", [None, 1])
def test_arrays_are_the_library_s_wherever_blocks_end(monkeypatch, block, indent):
    monkeypatch.setattr("automodel_cli.data.json_array.BLOCK", block)
    rows = [{"a": 'b}]"{ \\ ü \U0001f600', "n": [1.5e-3, -12, True, None, {"x": []}]}, {}, {"tail": "]"}] * 3
    assert pieces(json.dumps(rows, indent=indent)) == rows
    assert pieces(json.dumps(rows, ensure_ascii=False)) == rows
    bad = json.loads('[{"a": 1}, 123456, {"b": 2}]')
    assert [str(row) for row in pieces(json.dumps(bad))] == [
        "{'a': 1}",
        "the row is a number, but must be an object with columns",
        "{'b': 2}",
    ]


@pytest.mark.parametrize(
    ("content", "number", "problem"),
    [
        ('[{"a": 1},\n {"a": }]', 2, "not JSON: Expecting value (line 2, column 8)"),
        ('[{"a": 1}\n {"a": 2}]', 2, "not JSON: Expecting ',' delimiter (line 2, column 2)"),
        ('[{"a": 1},\n\n {"a": "x', 2, "not JSON: Unterminated string starting at (line 3, column 8)"),
        ('[{"a": 1}]\n{"a": 2}', 2, "not JSON: Extra data (line 2, column 1)"),
        ('[{"a": 1},]', 2, "not JSON: Expecting value (line 1, column 11)"),
        ("[", 1, "not JSON: Expecting value (line 1, column 2)"),
    ],
)
@pytest.mark.parametrize("block", [3, BLOCK])
def test_where_the_syntax_of_an_array_breaks(monkeypatch, content, number, problem, block):
    monkeypatch.setattr("automodel_cli.data.json_array.BLOCK", block)
    rows = list(read_array(io.BytesIO(content.encode())))
    assert (rows[-1][0], rows[-1][1].code, rows[-1][1].message) == (number, DAMAGED, problem)
    assert [row for _, row in rows[:-1]] == [{"a": 1}] * (number - 1)


def test_bytes_that_are_no_text_are_the_row_s_error(tmp_path):
    assert [getattr(row, "message", row) for row in pieces(b'[{"a": "\xfc"}, {"a": "\xc3\xbc"}]')] == [
        "not UTF-8: byte 0xfc",
        {"a": "ü"},
    ]
    path = tmp_path / "x.csv"
    path.write_bytes(b"q,a\none,gr\xfc\xdfe\ntwo,b\n")
    assert [getattr(row, "message", row) for _, row in read_file(path)] == [
        "not UTF-8: byte 0xfc",
        {"q": "two", "a": "b"},
    ]


def test_an_array_is_read_in_the_memory_of_a_block(tmp_path):
    path = tmp_path / "rows.json"
    row = json.dumps({"text": "x" * 10_000})
    path.write_text(f"[{','.join([row] * 3000)}]")  # 30 MB
    tracemalloc.start()
    assert sum(1 for _ in read_file(path)) == 3000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * BLOCK


def test_csv_with_an_open_quote_or_a_column_twice(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('q,a\none,"b\ntwo,c\n')
    assert [row.code for _, row in read_file(path)] == ["csv"]
    path.write_text("q,q\none,b\n")
    with raises(DataError, "ambiguous", values=("'q'",)):
        list(read_file(path))


# -- saved datasets, plain text


def saved(tmp_path):
    import datasets

    parts = {name: [{"text": f"{name} {i}"} for i in range(5)] for name in ("train", "test")}
    both = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()})
    both.save_to_disk(str(tmp_path / "both"))
    both["train"].save_to_disk(str(tmp_path / "one"), num_shards=2)
    return parts


def test_folders_that_datasets_saved(tmp_path):
    parts = saved(tmp_path)

    def texts(name, split="train"):
        return [origin.row for origin in open_source(SourceConfig(str(tmp_path / name), split=split), tmp_path).rows()]

    assert texts("one") == texts("both") == parts["train"]
    assert texts("both", "test") == parts["test"]
    with raises(DataError, "unknown_name", values=("'validation'", "train, test"), fix="data.split=train"):
        texts("both", "validation")
    (tmp_path / "one" / "data-00001-of-00002.arrow").unlink()
    with raises(DataError, "missing_file", values=("data-00001-of-00002.arrow",)):
        texts("one")


def test_a_split_of_a_saved_dict_validates(tmp_path):
    saved(tmp_path)
    config = DataConfig(path=str(tmp_path / "both"), validation_split="test", cache_dir=str(tmp_path / "cache"))
    prepared = prepare_data(config, tiny_tokenizer(), seed=0)
    assert (prepared.report.train[0].num_documents, prepared.report.validation[0].num_documents) == (5, 5)
    assert prepared.report.train[0].name.endswith("both")


@pytest.mark.parametrize(("key", "value"), [("split", "test"), ("name", "main"), ("revision", "abc")])
def test_what_belongs_to_the_hub_is_refused_for_a_file(tmp_path, key, value):
    path = write_jsonl(tmp_path / "rows.jsonl", [GOOD])
    with raises(DataError, "no_effect", keys=(f"data.{key}",), values=(value, path)):
        open_source(SourceConfig(str(path), **{key: value}), tmp_path)


@pytest.mark.parametrize(
    ("text_unit", "expected"),
    [
        ("file", [(1, "one\ntwo\n\n\nthree ü\n")]),
        ("paragraph", [(1, "one\ntwo"), (5, "three ü")]),
        ("line", [(1, "one"), (2, "two"), (5, "three ü")]),
    ],
)
@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_plain_text(tmp_path, text_unit, expected, suffix):
    content = "one\ntwo\n\n\nthree ü\n".encode()
    path = tmp_path / f"book{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    assert list(read_file(path, text_unit)) == [(number, {"text": text}) for number, text in expected]
    config = DataConfig(path=str(path), text_unit=text_unit, cache_dir=str(tmp_path / "cache"))
    report = prepare_data(config, tiny_tokenizer(), seed=0).report.train[0]
    assert (report.fmt, report.num_documents) == ("text, detected", len(expected))


def test_a_text_too_large_for_one_document(tmp_path, monkeypatch):
    monkeypatch.setattr("automodel_cli.data.sources.text_reader.MAX_DOCUMENT", 10)
    (tmp_path / "book.txt").write_text("more than ten")
    with raises(DataError, "limit_exceeded", keys=("data.text_unit",), fix="data.text_unit=paragraph"):
        list(read_file(tmp_path / "book.txt"))


def test_texts_beside_tables_are_no_data(tmp_path):
    for name in ("b.txt", "a.txt"):
        (tmp_path / name).write_text("x")
    assert [path.name for path in local_files(str(tmp_path))] == ["a.txt", "b.txt"]
    write_jsonl(tmp_path / "rows.jsonl", [GOOD])
    assert [path.name for path in local_files(str(tmp_path))] == ["rows.jsonl"]


HUB_NAMES = (
    *("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"),
    *("validation-00000-of-00001.jsonl", "test.jsonl"),
)


@pytest.fixture
def hub_folder(tmp_path):
    """A folder with the files of three splits, named as on the hub; each row says which file it is of."""
    folder = tmp_path / "many"
    folder.mkdir()
    for name in HUB_NAMES:
        write_jsonl(folder / name, [chat_row(name, "yes")])
    return folder


def test_the_files_of_one_split_of_a_folder_are_read(hub_folder, tmp_path):
    assert [p.name for p in local_files(str(hub_folder))] == list(HUB_NAMES[:2])
    assert [p.name for p in local_files(str(hub_folder), "test")] == ["test.jsonl"]
    config = DataConfig(path=str(hub_folder), validation_split="validation", cache_dir=str(tmp_path / "cache"))
    data = prepare_data(config, tiny_tokenizer(), seed=0)
    (train,), (validation,) = data.report.train, data.report.validation
    assert (train.num_rows, validation.num_rows) == (2, 1)
    left_out = "left out: test.jsonl, validation-00000-of-00001.jsonl"
    assert f"  split train: {', '.join(HUB_NAMES[:2])}; {left_out}" in data.report.lines()


def test_a_folder_of_one_split_or_of_none_is_read_whole(hub_folder, tmp_path):
    for name in HUB_NAMES[:3]:
        (hub_folder / name).unlink()
    write_jsonl(hub_folder / "test-2.jsonl", [GOOD])
    assert [p.name for p in local_files(str(hub_folder))] == ["test-2.jsonl", "test.jsonl"]
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("latest.jsonl", "contested.jsonl"):
        write_jsonl(plain / name, [GOOD])
    assert [p.name for p in local_files(str(plain))] == ["contested.jsonl", "latest.jsonl"]


@pytest.mark.parametrize(
    ("more", "options", "code", "key", "value", "fix"),
    [
        ("extra.jsonl", {}, "ambiguous", "path", "extra.jsonl (no split), test.jsonl (test)", "'{}/train-0000*'"),
        ("train_test.jsonl", {}, "ambiguous", "path", "train_test.jsonl (no split)", "'{}/train-0000*'"),
        (None, {"split": "dev"}, "unknown_name", "split", "'dev'", "test"),
        (None, {"whole": True}, "ambiguous", "validation_path", "test.jsonl", "'{}/validation-00000-of-00001.jsonl'"),
    ],
)
def test_ambiguous_splits_of_a_folder_are_rejected(hub_folder, more, options, code, key, value, fix):
    if more:
        write_jsonl(hub_folder / more, [GOOD])
    key, fix = f"data.{key}", fix.format(hub_folder)
    with raises(DataError, code, keys=(key,), values=(hub_folder,), fix=f"{key}={fix}") as caught:
        local_files(str(hub_folder), **{"split": "train", **options})
    assert value in caught.value.message


# -- names of columns

QA = {"id": "7", "question": "how many", "answer": "seven"}


@pytest.mark.parametrize(
    ("row", "options", "fix"),
    [
        (
            QA,
            {"column_mapping": {"prompt": "qestion", "completion": "answer"}},
            "data.column_mapping='{prompt: question, completion: answer}'",
        ),
        (
            QA,
            {"column_mapping": {"prompt": "prompt_text", "completion": "gold"}},
            "data.column_mapping='{prompt: question, completion: answer}'",
        ),
        (
            QA,
            {"column_mapping": {"prompt": "Question", "completion": "answer"}, "format": "prompt_completion"},
            "data.column_mapping='{prompt: question, completion: answer}'",
        ),
        (
            {"id": "7", "a": "x", "b": "y"},
            {"column_mapping": {"text": "body"}},
            "data.column_mapping='{text: <one of a, b, id>}'",
        ),
        (  # an optional field, which would be empty in every row
            QA,
            {"column_mapping": {"prompt": "question", "completion": "answer", "system": "answr"}},
            "data.column_mapping='{prompt: question, completion: answer, system: <one of answer, id, question>}'",
        ),
        (QA, {}, "data.column_mapping='{prompt: question, completion: answer}'"),
        ({"id": "7", "chat": [{"role": "user", "content": "x"}]}, {}, "data.column_mapping='{messages: chat}'"),
        ({"id": "7", "page_content": "x", "url": "y"}, {}, "data.column_mapping='{text: page_content}'"),
        (
            {"id": "7", "a": "x"},
            {},
            "data.column_mapping='{prompt: <one of id, a>, completion: <one of id, a>}', or '{text: <one of id, a>}'",
        ),
    ],
)
def test_a_wrong_column_is_answered_with_the_right_one_and_never_with_a_guess(tmp_path, row, options, fix):
    path = write_jsonl(tmp_path / "rows.jsonl", [row] * 20)
    config = DataConfig(path=str(path), cache_dir=str(tmp_path / "cache"), **options)
    code = "unknown_name" if options else "unknown_format"
    with raises(DataError, code, keys=("data.column_mapping",)) as caught:
        prepare_data(config, tiny_tokenizer(), seed=0)
    assert caught.value.fix == fix


def test_an_optional_column_may_come_late(tmp_path):
    late = {**QA, "persona": "be brief"}
    path = write_jsonl(tmp_path / "rows.jsonl", [QA] * 40 + [late])
    columns = {"prompt": "question", "completion": "answer", "system": "persona"}
    config = DataConfig(path=str(path), column_mapping=columns, cache_dir=str(tmp_path / "cache"))
    assert prepare_data(config, tiny_tokenizer(), seed=0).report.train[0].num_documents == 41


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet"])
def test_a_text_column_of_a_table(tmp_path, name):
    path = tmp_path / name
    if name.endswith("csv"):
        path.write_text("id,content,score\n1,some text,0.5\n2,more text,0.25\n")
    else:
        import pyarrow
        import pyarrow.parquet

        rows = [{"id": 1, "content": "some text", "score": 0.5}, {"id": 2, "content": "more text", "score": 0.25}]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    config = DataConfig(path=str(path), column_mapping={"text": "content"}, cache_dir=str(tmp_path / "cache"))
    tokenizer = tiny_tokenizer()
    prepared = prepare_data(config, tokenizer, seed=0)
    assert tokenizer.decode(prepared.train.tokens(0)[0]) == "some text<|im_end|>more text<|im_end|>"


# -- long documents


def test_long_chats_are_truncated_and_long_texts_split_and_both_are_counted(tmp_path):
    long_chat = chat_row("a question", "word " * 100)
    chats = write_jsonl(tmp_path / "chats.jsonl", [chat_row("hi", "yes"), long_chat])
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": "word " * 100}])
    sources = [SourceConfig(str(chats)), SourceConfig(str(texts))]
    config = DataConfig(datasets=sources, seq_len=64, cache_dir=str(tmp_path / "cache"))
    tokenizer = tiny_tokenizer()
    prepared = prepare_data(config, tokenizer, seed=0)
    of_chats, of_texts = prepared.report.train
    assert (of_chats.long.choice, of_texts.long.choice) == ("truncate", "split")
    whole = len(tokenizer.apply_chat_template(long_chat["messages"])["input_ids"])
    assert of_chats.long.tokens_lost == whole - 64 and of_texts.long.tokens_lost == 0
    assert f"1 of 2 documents longer than a row truncated ({whole} tokens; {whole - 64} tokens left out)" in (
        "\n".join(prepared.report.lines())
    )
    # every piece of a chat begins as the chat does
    for row in range(len(prepared.train)):
        ids, _, bounds = prepared.train.tokens(row)
        for (name, _), start in zip(prepared.train.documents(row), bounds[:-1], strict=True):
            assert name == "texts.jsonl" or tokenizer.decode(ids[start : start + 1]) == "<|im_start|>"


def test_many_documents_left_out_are_a_warning_with_the_length_that_keeps_them(tmp_path):
    rows = [{"prompt": "q", "chosen": "yes " * n, "rejected": "no " * n} for n in (1, 2, 30, 32, 34, 36, 38, 40, 90, 3)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    cache = str(tmp_path / "cache")
    config = DataConfig(path=str(path), seq_len=64, on_invalid_row="drop", cache_dir=cache)
    report = prepare_data(config, tiny_tokenizer(), seed=0, preferences=True).report.train[0]
    (warning,) = [line for line in report.lines() if "are left out" in line]
    assert warning.startswith(
        "  warning: 70% of the documents (7 of 10) are left out, longer than a row of 64: data.seq_"
    )
    needed = int(warning.split("data.seq_len=")[1].split()[0])
    for seq_len, kept in ((needed, 10), (needed - 64, 9)):
        config = DataConfig(path=str(path), seq_len=seq_len, cache_dir=cache)
        report = prepare_data(config, tiny_tokenizer(), seed=0, preferences=True).report.train[0]
        assert report.num_documents - report.long.num_documents == kept


def test_a_chat_truncated_to_its_prompt_is_counted_not_trained(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [chat_row("word " * 100, "x"), chat_row("a", "b")])
    config = DataConfig(path=str(path), seq_len=32, cache_dir=str(tmp_path / "cache"))
    prepared = prepare_data(config, tiny_tokenizer(), seed=0)
    assert prepared.report.train[0].long.pieces_without_labels == 1
    assert "warning: 50% of the documents (1 of 2) are left out, without a trained token in their first row of 32" in (
        "\n".join(prepared.report.lines())
    )
    assert [name for row in range(len(prepared.train)) for name in prepared.train.documents(row)] == [("rows.jsonl", 2)]
