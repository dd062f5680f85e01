"""From rows on disk to packed rows: the cache, its key, what happens to bad rows and long documents, the printout."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from automodel_cli.config.errors import DataError
from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.data.config import DataConfig
from automodel_cli.data.preparation.inspect_rows import show_rows
from automodel_cli.data.preparation.pipeline import prepare_data
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.storage.cache import file_hash, get_or_build, tokenizer_fingerprint
from tests.errors import raises
from tests.unit.data.helpers import NATIVE, TAGGED, chat_row, tiny_tokenizer, write_jsonl

CHATS = [chat_row(f"what is {i}", f"the answer is {i}", "and now", "seven" * (1 + i % 5)) for i in range(40)]


@pytest.fixture
def config(tmp_path):
    path = write_jsonl(tmp_path / "train.jsonl", CHATS)
    return DataConfig(path=str(path), seq_len=128, cache_dir=str(tmp_path / "cache"))


def entries(config):
    """Complete cache entries, and nothing else may stand there but lock files."""
    names = [name for name in os.listdir(config.cache_dir) if not name.endswith(".lock")]
    assert not [name for name in names if "tmp" in name]
    return set(names)


def label_tokens(prepared):
    return sorted(
        token
        for row in range(len(prepared.train))
        for token in prepared.train.collate([row]).labels_BT.flatten().tolist()
        if token != IGNORE_INDEX
    )


# -- the same training signal however it is packed


@pytest.mark.parametrize("packing", ["best_fit", "none"])
@pytest.mark.parametrize("template", [NATIVE, TAGGED])
def test_labels_are_the_library_s_whatever_the_packing(config, packing, template):
    tokenizer = tiny_tokenizer(template)
    prepared = prepare_data(replace(config, packing=packing), tokenizer, seed=0)
    expected = []
    for row in CHATS:
        out = tiny_tokenizer(TAGGED).apply_chat_template(
            row["messages"], return_assistant_tokens_mask=True, return_dict=True
        )
        expected += [i for i, flag in zip(out["input_ids"], out["assistant_masks"], strict=True) if flag]
    assert label_tokens(prepared) == sorted(expected)
    lengths = {len(prepared.train.tokens(row)[0]) for row in range(len(prepared.train))}
    assert max(lengths) <= 128 and (len(prepared.train) == len(CHATS)) == (packing == "none")


def test_split_documents_lose_only_the_labels_at_their_cuts_and_pieces_without_labels(config):
    short = replace(config, seq_len=32, truncation="split")
    whole, split = (prepare_data(c, tiny_tokenizer(), seed=0) for c in (config, short))
    lost = len(label_tokens(whole)) - len(label_tokens(split))
    (report,) = split.report.train
    assert 0 <= lost <= report.long.num_documents * 3
    assert report.long.num_documents == len(CHATS) and report.num_packed_rows == len(split.train)
    dropped = prepare_data(replace(config, seq_len=64, truncation="drop"), tiny_tokenizer(), seed=0).report.train[0]
    assert 0 < dropped.long.num_documents < len(CHATS)
    assert dropped.long.tokens_lost == dropped.long.num_tokens > 0
    enough = f"data.seq_len={-(-dropped.long.longest // 64) * 64}"
    with raises(DataError, "not_enough_rows", keys=("data.seq_len",), values=(8,), fix=enough):
        prepare_data(replace(config, seq_len=8, truncation="drop"), tiny_tokenizer(), seed=0)


@pytest.mark.parametrize("packing", ["best_fit", "wrapped", "none"])
def test_cut_documents_predict_nothing_across_their_cuts(config, packing):
    prepared = prepare_data(replace(config, seq_len=24, packing=packing, loss_mask="all"), tiny_tokenizer(), seed=0)
    data = prepared.train
    batch = data.collate(range(len(data)))
    labels, ids = batch.labels_BT.flatten(), batch.input_ids_BT.flatten()
    ends = batch.cu_seqlens[1:].long() - 1
    assert (labels[ends] == IGNORE_INDEX).all()
    trained = (labels != IGNORE_INDEX).nonzero().flatten()
    assert (labels[trained] == ids[trained + 1]).all()
    # every token but the first of each piece is a label, and padding is not
    tokens = sum(len(data.tokens(row)[0]) for row in range(len(data)))
    pieces = sum(len(data.documents(row)) for row in range(len(data)))
    assert len(trained) == tokens - pieces == sum(data.num_label_tokens(row) for row in range(len(data)))


def test_truncation_to_nothing_is_refused_like_a_bad_row(config):
    with pytest.raises(DataError) as caught:
        prepare_data(replace(config, seq_len=12, truncation="truncate"), tiny_tokenizer(), seed=0)
    assert caught.value.message.startswith(
        "40 of 40 rows cannot be used (100.0%, 1 cause)\n"
        "  train.jsonl:1: after truncation to seq_len=12 no trained token is left\n"
    )


@pytest.mark.slow
def test_workers_give_what_one_process_gives(config, tmp_path):
    alone = prepare_data(config, tiny_tokenizer(), seed=0)
    other = replace(config, num_workers=2, cache_dir=str(tmp_path / "other"))
    pool = prepare_data(other, tiny_tokenizer(), seed=0)
    for row in range(len(alone.train)):
        for mine, theirs in zip(alone.train.tokens(row), pool.train.tokens(row), strict=True):
            assert np.array_equal(mine, theirs)


# -- validation, mixtures, tasks


def test_held_out_rows_are_not_trained_on(config):
    prepared = prepare_data(replace(config, validation_size=0.25, packing="none"), tiny_tokenizer(), seed=5)
    lines = [
        {line for row in range(len(part)) for _, line in part.documents(row)}
        for part in (prepared.train, prepared.validation)
    ]
    assert len(lines[1]) == 10 and lines[0] | lines[1] == set(range(1, 41)) and not lines[0] & lines[1]
    again = prepare_data(replace(config, validation_size=10, packing="none"), tiny_tokenizer(), seed=6)
    assert {line for row in range(10) for _, line in again.validation.documents(row)} != lines[1]


def test_several_datasets_of_different_shapes(config, tmp_path):
    write_jsonl(tmp_path / "b.jsonl", [{"q": "one", "a": "two"}] * 20)
    sources = [
        SourceConfig(config.path),
        SourceConfig(str(tmp_path / "b.jsonl"), epochs=0.5, column_mapping={"prompt": "q", "completion": "a"}),
    ]
    mixed = DataConfig(datasets=sources, seq_len=128, cache_dir=config.cache_dir, validation_size=6, packing="none")
    prepared = prepare_data(mixed, tiny_tokenizer(), seed=0)
    assert [store.num_rows for store in prepared.validation.stores] == [4, 2]
    assert prepared.train.mixture.epochs == (1.0, 0.5) and len(prepared.train) == 54
    assert prepared.report.lines()[3] == "b.jsonl: 20 rows (prompt_completion, detected), each seen 0.5 times per epoch"


@dataclass(frozen=True)
class Countdown:
    number: int = 3

    def rows(self, split):
        return (chat_row(f"{split} {i}", str(i)) for i in range(self.number))

    def cache_key(self):
        return f"countdown {self.number}"


def test_a_task_brings_its_own_validation_rows(tmp_path):
    config = DataConfig(generator=Countdown(), cache_dir=str(tmp_path), packing="none")
    prepared = prepare_data(config, tiny_tokenizer(), seed=0)
    assert len(prepared.train) == len(prepared.validation) == 3
    assert prepared.train.describe(1) == "Countdown/train:2"
    assert prepare_data(replace(config, generator=Countdown(4)), tiny_tokenizer(), seed=0).report.built


# -- bad rows


def spoil(config):
    rows = [CHATS[0], '{"messages": "oops"}', "not json", *CHATS[1:], {"messages": [{"role": "user", "content": "x"}]}]
    write_jsonl(Path(config.path), rows)


def test_bad_rows_stop_the_run_and_are_all_listed(config):
    spoil(config)
    expected = (
        "3 of 43 rows cannot be used (7.0%, 3 causes)\n"
        "  train.jsonl:2: messages is str, not a list of messages\n"
        '      2 | {"messages": "oops"}\n'
        "  train.jsonl:3: not JSON: Expecting value (column 1)\n"
        "      3 | not json\n"
        "  train.jsonl:43: the conversation has no assistant message to train on\n"
        '      43 | {"messages": [{"role": "user", "content": "x"}]}\n'
        "  try   correct the rows, or skip them: data.on_invalid_row=drop data.max_invalid_fraction=0.07"
    )
    for _ in range(2):  # the second time from the cache
        with pytest.raises(DataError) as caught:
            prepare_data(config, tiny_tokenizer(), seed=0)
        assert str(caught.value) == expected


def test_a_name_to_ignore_that_no_row_has_is_refused(config):
    """`id` is a column, `weight` a key of one message; nothing is called `wieght`. The cache refuses alike."""
    row = {"id": 7, "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": 1}]}
    write_jsonl(Path(config.path), [*CHATS, row])
    for _ in range(2):
        with pytest.raises(DataError) as caught:
            prepare_data(replace(config, ignored_columns=["id", "wieght"]), tiny_tokenizer(), seed=0)
        assert caught.value.keys == ("data.ignored_columns",) and "'wieght'" in caught.value.message
        assert caught.value.fix.strip("'") == "data.ignored_columns=[id,weight]"
    assert len(prepare_data(replace(config, ignored_columns=["id", "weight"]), tiny_tokenizer(), seed=0).train)


def test_dropped_rows_are_kept_aside_and_counted(config):
    spoil(config)
    keys, values = ("data.max_invalid_fraction",), ("data.max_invalid_fraction=0.01", "3 of 43 rows")
    with raises(DataError, "bad_rows", keys=keys, values=values):
        prepare_data(replace(config, on_invalid_row="drop"), tiny_tokenizer(), seed=0)
    prepared = prepare_data(replace(config, on_invalid_row="drop", max_invalid_fraction=0.07), tiny_tokenizer(), seed=0)
    (report,) = prepared.report.train
    assert (report.num_rows, report.num_rejected, report.num_documents) == (43, 3, 40)
    with open(report.rejected_path) as file:
        rejected = [json.loads(line) for line in file]
    assert [(r["source"], r["line"], r["code"], r["row"]) for r in rejected] == [
        ("train.jsonl", 2, "not_messages", {"messages": "oops"}),
        ("train.jsonl", 3, "not_json", "not json"),
        ("train.jsonl", 43, "no_label_token", {"messages": [{"role": "user", "content": "x"}]}),
    ]
    assert f"-> {report.rejected_path}" in prepared.report.lines()[1]


def test_data_without_any_usable_row_is_refused(config, tmp_path):
    (tmp_path / "train.jsonl").write_text("\n")
    with raises(DataError, "not_enough_rows", values=("train.jsonl",)):
        prepare_data(config, tiny_tokenizer(), seed=0)
    write_jsonl(tmp_path / "train.jsonl", [chat_row("only a question")] * 3)
    with raises(DataError, "not_enough_rows", values=("train.jsonl", 3)):
        prepare_data(replace(config, on_invalid_row="drop", max_invalid_fraction=1.0), tiny_tokenizer(), seed=0)


def test_messages_without_a_template_are_refused_with_a_way_out(config):
    with raises(DataError, "bad_rows", values=("chat template",)):
        prepare_data(config, tiny_tokenizer(None), seed=0)


# -- the cache


def test_every_ingredient_changes_the_key_and_nothing_else_does(config, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [{**row, "chat": row["messages"]} for row in CHATS])
    prepare_data(config, tiny_tokenizer(), seed=0)
    known = entries(config)
    assert len(known) == 2

    def new(changed=config, tokenizer=None):
        nonlocal known
        prepare_data(changed, tokenizer or tiny_tokenizer(), seed=0)
        before, known = known, entries(config)
        return len(known - before)

    for same in (
        replace(config, shuffle=False),
        replace(config, on_invalid_row="drop", max_invalid_fraction=0.5),
        replace(config, num_workers=0),
        replace(config, validation_path=config.path),
    ):
        assert new(same) == 0
    assert new() == 0
    other = tiny_tokenizer()
    other.add_tokens(["chat template"])
    for tokens_differ in (
        (replace(config, column_mapping={"messages": "chat"}),),
        (replace(config, format="messages"),),
        (replace(config, loss_mask="last_turn"),),
        (replace(config, chat_template=TAGGED),),
        (config, tiny_tokenizer(TAGGED.replace("\n", "\n\n"))),
        (replace(config, multi_turn="per_turn"),),
        (config, other),
    ):
        assert new(*tokens_differ) == 2
    for packing_differs in ({"seq_len": 130}, {"packing": "wrapped"}, {"truncation": "drop"}):
        assert new(replace(config, **packing_differs)) == 1
    assert new(replace(config, validation_size=4)) == 2
    write_jsonl(tmp_path / "train.jsonl", [{**row, "chat": row["messages"]} for row in CHATS[::-1]])
    assert new() == 2
    assert new() == 0


def test_the_code_of_the_package_is_part_of_the_key(config, monkeypatch):
    prepare_data(config, tiny_tokenizer(), seed=0)
    monkeypatch.setattr("automodel_cli.data.storage.cache.data_code_version", lambda: "other code")
    assert prepare_data(config, tiny_tokenizer(), seed=0).report.built


def test_earlier_calls_that_pad_or_truncate_do_not_change_the_tokenizer_s_key():
    tokenizer = tiny_tokenizer()
    before = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "a small text"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(tokenizer) == before


def test_hashes_of_large_files_are_remembered_until_the_file_changes(tmp_path, monkeypatch):
    monkeypatch.setattr("automodel_cli.data.storage.cache.REMEMBERED_HASH_BYTES", 4)
    path = tmp_path / "big.jsonl"
    path.write_text("first")
    first = file_hash(path, tmp_path)
    assert file_hash(path, tmp_path) == first and len(os.listdir(tmp_path / "hashes")) == 1
    path.write_text("other")
    assert file_hash(path, tmp_path) != first


def _build_slowly(root, started, log):
    def build(folder):
        (folder / "half").write_text("x")
        started.set()
        with open(log, "a") as file:
            file.write("built\n")
        time.sleep(1.0)
        (folder / "whole").write_text("x")

    folder, _ = get_or_build(root, "key", build)
    assert (folder / "whole").is_file()


def test_a_killed_builder_leaves_nothing_half_made_and_the_next_one_cleans_up(tmp_path):
    context = multiprocessing.get_context("fork")
    started = context.Event()
    builder = context.Process(target=_build_slowly, args=(tmp_path, started, tmp_path / "log"))
    builder.start()
    assert started.wait(10)
    os.kill(builder.pid, signal.SIGKILL)
    builder.join()
    assert not (tmp_path / "key").exists() and len(list(tmp_path.glob("key.tmp-*"))) == 1
    folder, built = get_or_build(tmp_path, "key", lambda folder: (folder / "whole").write_text("x"))
    assert built and sorted(os.listdir(folder)) == ["files.json", "whole"] and not list(tmp_path.glob("key.tmp-*"))


@pytest.mark.parametrize("name", ["ids.bin", "offsets.npy", "meta.json", "files.json"])
@pytest.mark.parametrize("what", ["cut", "changed", "missing"])
def test_a_damaged_entry_is_built_again_aloud(config, capsys, name, what):
    tokenizer = tiny_tokenizer(TAGGED)
    before = label_tokens(prepare_data(config, tokenizer, seed=0))
    damaged = [Path(config.cache_dir) / entry / name for entry in entries(config)]
    assert len(damaged) == 2, "tokens and rows"
    for path in damaged:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.unlink()  # a mapped file must not shrink
        if what != "missing":
            path.write_bytes(content[: -1 if what == "cut" else None])
    after = prepare_data(config, tokenizer, seed=0)
    assert capsys.readouterr().err.count("the data cache is damaged and is built again") == 2
    assert label_tokens(after) == before and after.report.built
    assert not prepare_data(config, tokenizer, seed=0).report.built
    assert capsys.readouterr().err == ""


def test_one_builds_the_others_wait(tmp_path):
    context = multiprocessing.get_context("fork")
    started = context.Event()
    processes = [context.Process(target=_build_slowly, args=(tmp_path, started, tmp_path / "log")) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_failed_build_is_passed_on_and_leaves_nothing(tmp_path):
    def fail(folder):
        (folder / "half").write_text("x")
        raise RuntimeError("row 3")

    with pytest.raises(RuntimeError, match="row 3"):
        get_or_build(tmp_path, "key", fail)
    assert [path.name for path in tmp_path.iterdir()] == ["key.lock"]


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="mounts a small file system")
def test_a_full_disk_is_named(tmp_path):
    if os.system(f"mount -t tmpfs -o size=64k tmpfs {tmp_path} 2>/dev/null"):
        pytest.skip("this machine does not allow mounts")
    try:
        with raises(DataError, "disk_full", keys=("data.cache_dir",), values=(tmp_path, "No space left on device")):
            get_or_build(tmp_path, "key", lambda folder: (folder / "ids.bin").write_bytes(bytes(1 << 20)))
    finally:
        os.system(f"umount {tmp_path}")


# -- what is printed


def shown(prepared, tokenizer, **options):
    console = Console(width=200, color_system=options.pop("colour", None), force_terminal=True, highlight=False)
    with console.capture() as capture:
        show_rows(prepared, tokenizer, console=console, **options)
    return capture.get()


def test_inspect_marks_trained_masked_special_tokens_and_documents(tmp_path):
    tokenizer = tiny_tokenizer()
    path = write_jsonl(tmp_path / "train.jsonl", [chat_row("hé", "ünd €"), chat_row("about", "chat")])
    prepared = prepare_data(
        DataConfig(path=str(path), seq_len=128, cache_dir=str(tmp_path / "cache")), tokenizer, seed=0
    )
    plain = shown(prepared, tokenizer, rows=1)
    assert "{ünd €<|im_end|>}[\n]" in plain and "[<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n]{" in plain
    assert "── document 2: train.jsonl:2, " in plain and "\x1b[" not in plain
    colour = shown(prepared, tokenizer, rows=1, colour="standard")
    assert "\x1b[32münd €\x1b[0m\x1b[7;32m<|im_end|>\x1b[0m" in colour
    assert plain.endswith("{trained} [masked]\n") and "trained (" in plain


def test_inspect_writes_control_characters_out(tmp_path):
    tokenizer = tiny_tokenizer()
    path = write_jsonl(tmp_path / "train.jsonl", [chat_row("h\x1b[2J", "about")])
    prepared = prepare_data(
        DataConfig(path=str(path), seq_len=128, cache_dir=str(tmp_path / "cache")), tokenizer, seed=0
    )
    plain = shown(prepared, tokenizer, rows=1)
    assert "\x1b" not in plain and r"h\x1b[2J" in plain


def test_inspect_shows_the_row_asked_for_or_the_worst(tmp_path):
    tokenizer = tiny_tokenizer()
    rows = [chat_row("x", "long answer " * 5), chat_row("long question " * 5, "y"), chat_row("x", "y")]
    path = write_jsonl(tmp_path / "train.jsonl", rows)
    config = DataConfig(path=str(path), packing="none", cache_dir=str(tmp_path / "cache"))
    prepared = prepare_data(config, tokenizer, seed=0)
    assert "document 1: train.jsonl:2," in shown(prepared, tokenizer, rows=1, worst=True)
    assert shown(prepared, tokenizer, row=2).startswith("row 2 of 3:")
    with raises(DataError, "out_of_range", keys=("--row",), values=(3, 0, 2), fix="--row 2"):
        shown(prepared, tokenizer, row=3)


def test_the_report_says_what_was_done(config):
    report = prepare_data(config, tiny_tokenizer(), seed=0).report
    lines = report.lines()
    assert lines[0] == "train.jsonl: 40 rows (messages, detected)"
    assert lines[1].endswith("loss mask: prefix difference, verified per row (assistant turns)")
    assert lines[2].startswith("  packed best_fit into ") and lines[2].endswith("no document longer than a row")
    assert lines[3].startswith("prepared in ")
    assert (
        prepare_data(config, tiny_tokenizer(), seed=0).report.lines()[3] == f"taken from the cache {config.cache_dir}"
    )


ENDLESS = (
    "{% for m in messages %}{{ m['role'] + ':\n' + m['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
)


def test_a_turn_that_the_template_leaves_open_is_trained_to_end_with_eos(config):
    tokenizer = tiny_tokenizer()
    prepared = prepare_data(replace(config, chat_template=ENDLESS, packing="none"), tokenizer, seed=0)
    for row in range(len(prepared.train)):
        ids, mask, _ = prepared.train.tokens(row)
        last = int(np.flatnonzero(mask)[-1])
        assert ids[last + 1] == tokenizer.eos_token_id and last + 2 == len(ids)
    tokenizer.eos_token = None
    with raises(DataError, "bad_rows", values=("no EOS token",)):
        prepare_data(replace(config, chat_template=ENDLESS), tokenizer, seed=0)


def test_texts_without_an_end_are_warned_about(config, tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [{"text": "a small text"}] * 4)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    lines = prepare_data(config, tokenizer, seed=0).report.lines()
    ends = "only 0% of the documents end their last trained turn with a special token"
    assert lines[3] == f"  warning: {ends}: the model may never learn to stop"
