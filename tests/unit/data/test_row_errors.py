"""Reading files and shapes of rows: what is understood, and the exact words for what is not."""

from __future__ import annotations

import csv
import gzip
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.config.fix_syntax import alternatives, kind
from automodel_cli.data.config import DataConfig
from automodel_cli.data.formats.builtin import FORMATS, detect_format
from automodel_cli.data.formats.column_mapping import columns_fix
from automodel_cli.data.formats.examples import AnsweredPrompt, Conversation
from automodel_cli.data.formats.format_reader import RowReader
from automodel_cli.data.formats.unused_columns import MEDIA, AllowedKeys, unused_columns
from automodel_cli.data.row_errors import Rejected, RowError, TableRow, attempt_batch, attempt_each, rows_error
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.sources.file_discovery import local_files
from automodel_cli.data.sources.file_readers import read_file
from tests.errors import raises
from tests.unit.data.helpers import turn, write_jsonl

ROWS = [{"q": "a", "a": "b"}, {"q": "c", "a": "ü"}]


def reasons(path):
    """(number, message) of the rows that cannot be read."""
    return [(n, row.message) for n, row in read_file(path) if isinstance(row, RowError)]


def read_one(fmt, row):
    return RowReader(FORMATS[fmt], {}, chat=True).read(row)


def fix_of(row):
    """The fix of rows whose format cannot be told."""
    with raises(DataError, "unknown_format") as refused:
        detect_format([row], {}, "x")
    return refused.value.fix


# -- readers


def write_parquet(path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


def write_arrow(path, opener):
    import pyarrow

    table = pyarrow.Table.from_pylist(ROWS)
    with opener(pyarrow.ipc)(str(path), table.schema) as writer:
        writer.write_table(table)


WRITERS = {
    "x.jsonl": lambda p: write_jsonl(p, ROWS),
    "x.json": lambda p: p.write_text("\ufeff" + json.dumps(ROWS, indent=1)),
    "lines.json": lambda p: write_jsonl(p, ROWS),
    "x.jsonl.gz": lambda p: p.write_bytes(gzip.compress("\n\n".join(map(json.dumps, ROWS)).encode())),
    "x.csv": lambda p: p.write_text('q,a\na,b\n"c",ü\n', encoding="utf-8"),
    "x.parquet": write_parquet,
    "file.arrow": lambda p: write_arrow(p, lambda ipc: ipc.new_file),
    "stream.arrow": lambda p: write_arrow(p, lambda ipc: ipc.new_stream),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_form_gives_the_same_rows(tmp_path, name):
    WRITERS[name](tmp_path / name)
    numbers, rows = zip(*read_file(tmp_path / name), strict=True)
    assert list(rows) == ROWS
    assert numbers == ((1, 3) if name == "x.jsonl.gz" else (1, 2))  # a blank line is a line, not a row


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
def test_csv_with_another_separator_is_read(tmp_path, delimiter):
    text = f'q{delimiter}a\n1,5{delimiter}b\n"x{delimiter}y"{delimiter}ü\n'
    (tmp_path / "x.csv").write_text(text, encoding="utf-8")
    rows = [row for _, row in read_file(tmp_path / "x.csv")]
    assert rows == [{"q": "1,5", "a": "b"}, {"q": f"x{delimiter}y", "a": "ü"}]
    (tmp_path / "y.csv").write_text('"q;1",a\n1;5,b\n', encoding="utf-8")  # a comma in the header decides
    assert [row for _, row in read_file(tmp_path / "y.csv")] == [{"q;1": "1;5", "a": "b"}]
    (tmp_path / "z.csv").write_text("text\na; b\n", encoding="utf-8")
    assert [row for _, row in read_file(tmp_path / "z.csv")] == [{"text": "a; b"}]


@pytest.mark.parametrize("name", ["my rows.jsonl", "x.csv", "x.json.gz", "x.txt"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-16-le", "utf-32"])
def test_the_fix_of_a_file_of_wide_characters_converts_it(tmp_path, name, encoding, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = {"csv": "text\nhellö\n", "txt": "hellö"}.get(name.rpartition(".")[2], '{"text": "hellö"}\n')
    content = text.encode(encoding)
    Path(name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with raises(DataError, "unsupported_file_type", values=(name,)) as refused:
        list(read_file(Path(name)))
    assert kind(alternatives(refused.value.fix)[0]) == "command"
    subprocess.run(refused.value.fix, shell=True, check=True)
    (made,) = [path for path in tmp_path.iterdir() if path.name != name]
    assert made.name in str(refused.value) and [row for _, row in read_file(made)] == [{"text": "hellö"}]


OPENAI = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]


@pytest.mark.parametrize("messages", [OPENAI, SHAREGPT])
def test_messages_as_json_text_are_messages(tmp_path, messages):
    """A csv file has no other way to hold them."""
    text = json.dumps(messages)
    with (tmp_path / "x.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["messages"], [text]])
    ((_, row),) = read_file(tmp_path / "x.csv")
    as_lists = read_one("messages", {"messages": messages})
    assert read_one(detect_format([row], {}, "x").name, row) == as_lists
    first, last = json.dumps(messages[:1]), json.dumps(messages[1:])
    for row in ({"prompt": first, "completion": last}, {"prompt": "hi", "completion": last}):
        assert read_one("prompt_completion", row) == as_lists
    assert columns_fix({"messages": "dialog"}) in fix_of({"dialog": text})


@pytest.mark.parametrize("prompt", ['[{"role": 1}]', "[1, 2]", "[", "[{broken", '[{"name": "x", "content": "y"}]'])
def test_json_that_holds_no_messages_stays_text(prompt):
    chat = read_one("prompt_completion", {"prompt": prompt, "completion": "b"})
    assert chat.messages[0]["content"] == prompt


def test_lines_that_are_no_rows_are_named_and_the_others_still_read(tmp_path):
    path = tmp_path / "train.jsonl"
    lines = [b'{"a": 1}', b'{"a": 1', b"[1, 2]", b'{"a": "\xff"}', b"", b'{"a": 2}', b'"oops"', b"{'a': 1}"]
    path.write_bytes(b"\n".join(lines) + b"\n")
    assert reasons(path) == [
        (2, "not JSON: Expecting ',' delimiter (column 8)"),
        (3, "the row is a list, but must be an object with columns"),
        (4, "not UTF-8: byte 0xff at byte 8 of the line"),
        (7, "the row is text, but must be an object with columns"),
        (8, "not JSON: Expecting property name enclosed in double quotes (column 2)"),
    ]
    assert [row for _, row in read_file(path) if not isinstance(row, RowError)] == [{"a": 1}, {"a": 2}]


def test_csv_records_with_other_cells_than_the_header_are_named(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('q,a\none\n"a ""quoted"", text\nover lines",b\nx,y,z\n')
    assert reasons(path) == [
        (1, "the record has 1 cells, but the header has 2 columns"),
        (3, "the record has 3 cells, but the header has 2 columns"),
    ]
    assert dict(read_file(path))[2] == {"q": 'a "quoted", text\nover lines', "a": "b"}


@pytest.mark.parametrize(
    ("name", "content"), [("x.parquet", b"plain text, no table"), ("x.csv", b""), ("x.arrow", b"no table")]
)
def test_files_that_cannot_be_read_at_all(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with raises(DataError, "damaged_file", values=(name,)):
        list(read_file(tmp_path / name))


def test_paths_are_files_folders_globs_or_hub_ids(tmp_path):
    for name in ("b.jsonl", "a.jsonl", "notes.md"):
        (tmp_path / name).write_text("{}\n")
    assert [p.name for p in local_files(str(tmp_path))] == ["a.jsonl", "b.jsonl"]
    assert [p.name for p in local_files(f"{tmp_path}/*.jsonl")] == ["a.jsonl", "b.jsonl"]
    assert local_files("openai/gsm8k") is None
    for path, code in (
        (f"{tmp_path}/a.json", "missing_file"),
        (f"{tmp_path}/notes.md", "unsupported_file_type"),
        (f"{tmp_path}/*.csv", "missing_file"),
    ):
        with raises(DataError, code, keys=("data.path",)) as caught:
            local_files(path)
        assert path in caught.value.message
    with raises(DataError, "missing_file", fix=f"data.path={tmp_path}/a.jsonl"):
        local_files(f"{tmp_path}/a.json")


# -- formats


def read(fmt, row, columns=None, chat=True):
    return RowReader(FORMATS[fmt], columns or {}, chat=chat).read(row)


def said(document):
    return [(m["role"], m["content"]) for m in document.messages]


@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        ({"messages": [turn("user", "x")]}, {}, "messages"),
        ({"conversations": [{"from": "human", "value": "x"}]}, {}, "sharegpt"),
        ({"chat": [{"from": "human", "value": "x"}]}, {"messages": "chat"}, "sharegpt"),
        ({"instruction": "x", "input": "", "output": "y"}, {}, "alpaca"),
        ({"prompt": "x", "completion": "y"}, {}, "prompt_completion"),
        ({"question": "x", "answer": "y"}, {"prompt": "question", "completion": "answer"}, "prompt_completion"),
        ({"conversations": [], "chosen": {}}, {"prompt": "conversations", "completion": "chosen"}, "prompt_completion"),
        ({"text": "x", "id": 3}, {}, "text"),
        ({"body": "x"}, {"text": "body"}, "text"),
    ],
)
def test_formats_are_told_by_columns(row, columns, expected):
    assert detect_format([row, {**row, "more": 1}], columns, "x.jsonl").name == expected
    assert detect_format([{"id": 1}, row, row], columns, "x.jsonl").name == expected, (
        "one row that lacks all is a bad row"
    )


@pytest.mark.parametrize(
    ("row", "columns", "fix"),
    [
        (
            {"question": "x", "answer": "y"},
            "answer, question",
            "data.column_mapping='{prompt: question, completion: answer}'",
        ),
        (
            {"conversations": [], "chosen": "a", "rejected": "b"},
            "chosen, conversations, rejected",
            (
                "data.column_mapping='{prompt: conversations, completion: chosen}' trains on the preferred answer; "
                "a recipe of kind dpo trains on both"
            ),
        ),
    ],
)
def test_unknown_columns_come_with_a_map_to_paste(row, columns, fix):
    with raises(DataError, "unknown_format", keys=("data.column_mapping",), values=("x.jsonl", columns), fix=fix):
        detect_format([row], {}, "x.jsonl")


def test_alpaca_with_input_system_and_history():
    row = {"instruction": "add", "input": "1 2", "output": "3", "system": "be brief", "history": [["hi", "hello"]]}
    assert said(read("alpaca", row)) == [
        ("system", "be brief"),
        ("user", "hi"),
        ("assistant", "hello"),
        ("user", "add\n1 2"),
        ("assistant", "3"),
    ]


def test_sharegpt_with_tools_and_tool_roles():
    row = {
        "conversations": [
            {"from": "human", "value": "2+3?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 3}}'},
            {"from": "observation", "value": "5"},
            {"from": "gpt", "value": "five", "train": False},
        ],
        "system": "use tools",
        "tools": '[{"name": "add"}]',
    }
    document = read("sharegpt", row)
    assert [m["role"] for m in document.messages] == ["system", "user", "assistant", "tool", "assistant"]
    (call,) = document.messages[2]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": {"a": 2, "b": 3}} and call["type"] == "function"
    assert call["id"] == document.messages[3]["tool_call_id"], "made, since the row has none"
    assert document.tools == [{"name": "add"}] and document.trained == [False, False, True, False, False]


def test_openai_tool_calls_keep_tools_and_get_arguments_as_objects():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}, "index": None}
    row = {
        "messages": [
            turn("user", [{"type": "text", "text": "2+"}, {"type": "text", "text": "3?"}]),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            turn("tool", "5", tool_call_id="1"),
            turn("assistant", "five"),
        ],
        "tools": [{"type": "function", "function": {"name": "add", "description": None}}],
    }
    document = read("messages", TableRow(row))
    assert document.messages[0]["content"] == "2+3?"
    (read_call,) = document.messages[1]["tool_calls"]
    assert read_call == {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    assert document.tools == [{"type": "function", "function": {"name": "add"}}]  # arrow's None is an absent key
    assert read("messages", row, {"tools": ""}).tools is None


def test_prompt_and_completion_are_turns_with_a_template_and_text_without():
    row = {"prompt": "q", "completion": "a"}
    assert said(read("prompt_completion", row)) == [("user", "q"), ("assistant", "a")]
    assert read("prompt_completion", row, chat=False) == AnsweredPrompt("q", "a")
    preference = {
        "prompt": [turn("user", "q"), turn("assistant", "x"), turn("user", "r")],
        "completion": turn("assistant", "a"),
    }
    document = read("prompt_completion", preference)
    assert isinstance(document, Conversation) and document.trained == [False, False, False, True]


@pytest.mark.parametrize(
    ("fmt", "row", "message"),
    [
        ("messages", {"messages": "oops"}, "messages is str, not a list of messages"),
        ("messages", {"messages": []}, "messages is empty"),
        ("messages", {"messages": ["hi"]}, "messages[0] is str, not a message"),
        ("messages", {"messages": [{"content": "hi"}]}, "messages[0] has no 'role' (its keys: content)"),
        (
            "messages",
            {"messages": [turn("user", "x"), turn("function", "42")]},
            "messages[1].role is 'function', but must be one of: system, developer, user, assistant, tool",
        ),
        ("messages", {"messages": [turn("user", 3)]}, "messages[0].content is int, not text"),
        (
            "messages",
            {"messages": [turn("user", [{"type": "image_url"}])]},
            "messages[0].content[0] has type 'image_url', but only text is supported",
        ),
        (
            "messages",
            {"messages": [turn("assistant", " ")]},
            "messages[0] is an assistant message without content or tool calls",
        ),
        (
            "messages",
            {"messages": [turn("user", "x", vector=np.zeros(2))]},  # a generator may yield arrays
            "messages[0] has the key 'vector', which neither automodel nor the chat template reads",
        ),
        (
            "messages",
            {"messages": [turn("user", "x", train=True)]},
            "messages[0].train is true, but only assistant messages can be trained (role 'user')",
        ),
        ("messages", {"chat": []}, "the column 'messages' for messages is missing (columns: chat)"),
        (
            "sharegpt",
            {"conversations": [{"from": "bot", "value": "x"}]},
            (
                "conversations[0].from is 'bot', but must be one of: system, human, user, gpt, assistant, chatgpt, "
                "model, function_call, tool_call, observation, function_response, tool"
            ),
        ),
        ("sharegpt", {"conversations": [{"from": "gpt"}]}, "conversations[0].value is NoneType, not text"),
        ("alpaca", {"instruction": "x", "output": None}, "output is NoneType, not text"),
        ("alpaca", {"instruction": "x", "output": ""}, "output is empty"),
        ("alpaca", {"instruction": "x", "output": "y", "history": 3}, "history is int, not a list of pairs"),
        ("prompt_completion", {"prompt": "x"}, "the column 'completion' for completion is missing (columns: prompt)"),
        ("text", {"text": 5}, "text is int, not text"),
    ],
)
def test_malformed_rows_are_refused_in_these_words(fmt, row, message):
    with pytest.raises(RowError) as caught:
        read(fmt, row)
    assert caught.value.message == message


# -- errors over many rows


def test_rows_are_grouped_by_cause_first_in_full_the_rest_counted():
    alike = [Rejected("t.jsonl", n, "bad_role", f"role {n}", {"n": n}, "rename it") for n in range(3, 16)]
    other = [Rejected("t.jsonl", 2, "not_json", "not JSON", '{"a', None)]
    error = rows_error([*other, *alike], 1000, fix="data.on_invalid_row=drop")
    assert str(error) == (
        "14 of 1,000 rows cannot be used (1.4%, 2 causes)\n"
        "  t.jsonl:3: role 3\n"
        '      3 | {"n": 3}\n'
        "      fix rename it\n"
        "      12 more like this: t.jsonl:4, t.jsonl:5, t.jsonl:6, t.jsonl:7, t.jsonl:8, t.jsonl:9, t.jsonl:10, "
        "t.jsonl:11, ...\n"
        "  t.jsonl:2: not JSON\n"
        '      2 | {"a\n'
        "  fix   data.on_invalid_row=drop"
    )
    assert error.exit_code == 3


# -- the node


@pytest.mark.parametrize(
    ("options", "code", "keys", "values"),
    [
        ({}, "missing_key", (), ("path", "datasets", "generator")),
        ({"path": "x", "generator": object()}, "mutually_exclusive", ("path", "generator"), ()),
        ({"datasets": [SourceConfig("x")], "split": "test"}, "requires_setting", ("split",), ("datasets",)),
        (
            {"path": "x", "column_mapping": {"promt": "q"}},
            "unknown_name",
            ("column_mapping",),
            ("'promt'", "did you mean 'prompt'"),
        ),
        (
            {"path": "x", "validation_size": 3, "validation_path": "y"},
            "mutually_exclusive",
            ("validation_size", "validation_path"),
            (),
        ),
        ({"path": "x", "validation_size": 2.5}, "out_of_range", ("validation_size",), (2.5,)),
        ({"path": "x", "seq_len": 1}, "out_of_range", ("seq_len",), (1, 2)),
        ({"path": "x", "padding": "seq_len"}, "no_effect", ("padding", "packing"), ("padding=seq_len",)),
        (
            {"path": "x", "seq_len": 100, "pad_to_multiple_of": 16},
            "not_divisible",
            ("seq_len", "pad_to_multiple_of"),
            (100, 16),
        ),
        (
            {"path": "x", "packing": "wrapped", "truncation": "drop"},
            "unsupported_combination",
            ("packing", "truncation"),
            ("truncation=drop",),
        ),
        ({"path": "x", "max_invalid_fraction": 2}, "out_of_range", ("max_invalid_fraction",), (2,)),
        ({"path": "x", "num_workers": -1}, "out_of_range", ("num_workers",), (-1,)),
    ],
)
def test_the_node_rejects_invalid_settings(options, code, keys, values):
    with raises(ConfigError, code, keys=keys, values=values):
        DataConfig(**options)


def test_epochs_must_be_positive():
    with raises(ConfigError, "out_of_range", keys=("epochs",), values=("epochs=0",)):
        SourceConfig("x", epochs=0)


# -- columns and keys that nothing reads


def known(template="{{ message['prefix'] }}", *ignored):
    return AllowedKeys.of(template, ignored)


SAID = [turn("user", "x"), turn("assistant", "y")]
PLAIN = {"messages": SAID}


@pytest.mark.parametrize(
    ("fmt", "row", "column"),
    [
        ("messages", {**PLAIN, "label": False}, "label"),
        ("messages", {**PLAIN, "rejected": "z"}, "rejected"),
        ("messages", {**PLAIN, "images": ["cat.png"]}, "images"),
        ("messages", {**PLAIN, "audio": "cat.wav"}, "audio"),
        ("messages", {**PLAIN, "loss_weight": 0.5}, "loss_weight"),
        ("messages", {**PLAIN, "functions": [{"name": "add"}]}, "functions"),
        ("alpaca", {"instruction": "a", "output": "b", "tools": [{"name": "add"}]}, "tools"),
        ("alpaca", {"instruction": "a", "output": "b", "image": "cat.png"}, "image"),
        ("prompt_completion", {"prompt": "a", "completion": "b", "label": True}, "label"),
        ("prompt_completion", {"prompt": "a", "completion": "b", "reasoning": "c"}, "reasoning"),
        ("text", {"text": "a", "weight": 2}, "weight"),
    ],
)
def test_columns_that_mean_something_are_refused_until_they_are_ignored(fmt, row, column):
    fix_of_media = "data.on_invalid_row=drop data.max_invalid_fraction=1   (skips the rows that have it)"
    with pytest.raises(RowError) as caught:
        RowReader(FORMATS[fmt], {}, chat=True, keys=known()).read(row)
    assert caught.value.message.startswith(f"the row has the column {column!r}, which format {fmt} does not read: ")
    ignore = f"data.ignored_columns=[{column}] to train without it"  # but with images `<image>` is left in the text
    assert caught.value.fix == (fix_of_media if column in MEDIA else ignore)
    without = {key: value for key, value in row.items() if key != column}
    ignoring = RowReader(FORMATS[fmt], {}, chat=True, keys=known("", column)).read(row)
    assert ignoring == RowReader(FORMATS[fmt], {}, chat=True).read(without)
    empty = RowReader(FORMATS[fmt], {}, chat=True).read({**without, column: None})
    assert empty == ignoring


def test_columns_that_are_metadata_or_mapped_are_not_refused():
    row = {"id": 7, "source": "web", "chosen": "good", "rejected": "bad", "question": "x", "images": []}
    reader = RowReader(FORMATS["prompt_completion"], {"prompt": "question", "completion": "chosen"}, chat=True)
    assert said(reader.read(row)) == [("user", "x"), ("assistant", "good")]
    assert unused_columns([row], reader.columns_read) == ["id", "source", "images"]


@pytest.mark.parametrize(
    ("message", "where"),
    [
        (turn("assistant", "y", train_detail=[{"begin_offset": 0}]), "messages[1] has the key 'train_detail'"),
        (turn("assistant", "y", loss_weight=0.5), "messages[1] has the key 'loss_weight'"),
        (turn("assistant", "y", loss=False), "messages[1] has the key 'loss'"),
        (
            turn("assistant", [{"type": "text", "text": "y", "train": False}]),
            "messages[1].content[0] has the key 'train'",
        ),
        ({"from": "gpt", "value": "y", "loss": False}, "messages[1] has the key 'loss'"),
        ({"from": "gpt", "role": "assistant", "content": "y"}, "messages[1] has the key 'from'"),
    ],
)
def test_keys_that_nothing_reads_are_refused_until_they_are_ignored(message, where):
    row = {"messages": [{"from": "human", "value": "x"} if "value" in message else turn("user", "x"), message]}
    with pytest.raises(RowError) as caught:
        RowReader(FORMATS["messages"], {}, chat=True, keys=known()).read(row)
    assert caught.value.message.startswith(where)
    key = where.split("'")[1]
    assert caught.value.fix.startswith(f"data.ignored_columns=[{key}] to train without it")
    assert said(RowReader(FORMATS["messages"], {}, chat=True, keys=known("", key)).read(row)) == [
        ("user", "x"),
        ("assistant", "y"),
    ]


def test_keys_of_the_template_and_keys_without_a_value_pass():
    openai = turn("assistant", "y", refusal=None, annotations=[], prefix=True)
    document = RowReader(FORMATS["messages"], {}, chat=True, keys=known()).read(
        {"messages": [turn("user", "x"), openai]}
    )
    assert document.messages[1] == turn("assistant", "y", prefix=True)


def test_a_system_column_beside_messages_is_read_and_two_systems_are_refused():
    row = {**PLAIN, "system": "be brief"}
    assert said(read("messages", row))[0] == ("system", "be brief")
    same = {"messages": [turn("system", "be brief"), *SAID], "system": "be brief"}
    assert len(read("messages", same).messages) == 3
    with raises(RowError, "two_systems"):
        read("messages", {**same, "system": "be long"})


def test_a_call_or_reasoning_without_a_template_is_refused():
    row = {"prompt": "x", "completion": [turn("assistant", "y", reasoning_content="z")]}
    with raises(RowError, "no_template"):
        read("prompt_completion", row, chat=False)


def test_arguments_that_are_null_stay_and_empty_keys_of_messages_go():
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"unit": None}}}
    row = {"messages": [turn("user", "x", tool_calls=None), turn("assistant", None, tool_calls=[call])]}
    document = read("messages", row)
    assert document.messages[0] == turn("user", "x")
    assert document.messages[1]["tool_calls"][0]["function"]["arguments"] == {"unit": None}


def test_errors_keep_their_place_in_a_batch():
    def reciprocal(number):
        if not number:
            raise RowError("empty", "zero")
        return 1 / number

    first = RowError("not_json", "earlier")
    single = attempt_each(reciprocal, [4, first, 0, 2])
    assert [single[0], single[1], single[2].code, single[3]] == [0.25, first, "empty", 0.5]
    batches = []
    assert attempt_batch(lambda good: batches.append(good) or [sum(good), -1], [4, first, 2]) == [6, first, -1]
    assert batches == [[4, 2]]
