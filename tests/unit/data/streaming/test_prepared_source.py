"""`data.start_after`: a run beside the preparation of its data. The order does not depend on its speed."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.preparation import kept_shards, token_shards
from automodel_cli.data.preparation.build_shards import build_shards
from automodel_cli.data.sources import spans
from automodel_cli.data.stream_config import StreamConfig
from automodel_cli.models.tokenizer import ByteTokenizer
from tests.errors import raises
from tests.unit.data.helpers import write_jsonl
from tests.unit.data.streaming.test_stream_loader import LANES, loader, rows, saved, texts

SHARD_BYTES, ROWS = 250, 96


@pytest.fixture(autouse=True)
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(spans, "SHARD_BYTES", SHARD_BYTES)
    monkeypatch.setattr(kept_shards, "PATIENCE", 0.0)
    monkeypatch.setattr(kept_shards, "POLL", 0.02)
    write_jsonl(tmp_path / "rows.jsonl", rows(0, ROWS))


def config(**more: Any) -> DataConfig:
    options: dict[str, Any] = {"seq_len": 64, "packing": "none", "add_eos": False, "num_workers": 0}
    options |= {"streaming": StreamConfig(LANES, block_rows=6), "start_after": 2, "cache_dir": "cache", **more}
    return DataConfig(path="rows.jsonl", **options)


def prepare(data: DataConfig, index: int = 0, count: int = 1) -> int:
    return build_shards(data, ByteTokenizer().build(), index=index, count=count, progress=lambda line: None)


def start_preparation(seconds: float, monkeypatch: pytest.MonkeyPatch) -> BaseProcess:
    """A process that prepares, with a pause before each shard."""
    write = token_shards.TokenShards._write

    def slowly(self: Any, folder: Path, of_shard: Any) -> None:
        time.sleep(seconds)
        write(self, folder, of_shard)

    with monkeypatch.context() as patch:
        patch.setattr(token_shards.TokenShards, "_write", slowly)
        process = get_context("fork").Process(target=prepare, args=(config(),), daemon=True)
        process.start()
    return process


def await_shards(process: BaseProcess, number: int) -> None:
    deadline = time.monotonic() + 100
    while len(list(Path("cache").glob("*.shards/*/meta.json"))) < number:
        assert process.is_alive() and time.monotonic() < deadline
        time.sleep(0.02)


def test_a_pass_has_each_row_once_in_groups_of_shards() -> None:
    prepare(config())
    one = loader(config())
    groups = one.generations[0]
    assert len(groups) > 5 and {len(group) for group in groups[:-1]} == {2}
    want = Counter(row["text"] for row in rows(0, ROWS))
    found = [text for step in texts([one], ROWS // 8) for text in step]
    assert sum((want - Counter(found)).values()) < ROWS // 4, "lanes differ by some rows"
    every = Counter(text for step in texts([one], ROWS // 8) for text in step) + Counter(found)
    assert set(every) == set(want) and max(every.values()) <= 3
    numbers = [int(text.split()[1]) for text in found]
    assert max(numbers[:8]) < ROWS // 3 and numbers[:8] != sorted(numbers[:8]), "early shards first, shuffled"


def test_sequences_are_those_of_a_stream_of_the_text() -> None:
    """Tokens, labels and packing of a block are those that the streamed run makes of the same rows itself."""
    options: dict[str, Any] = {"shuffle": False, "microbatch_size": 8}
    data = config(packing="best_fit", seq_len=48, start_after=100, streaming=StreamConfig(1, block_rows=16))
    prepare(data)
    own = config(packing="best_fit", seq_len=48, start_after=None, num_workers=None, streaming=data.streaming)
    ours, theirs = loader(data, **options), loader(own, **options)
    for _ in range(6):
        for a, b in zip(ours.next_step(), theirs.next_step(), strict=True):
            assert a.input_ids_BT.equal(b.input_ids_BT) and a.labels_BT.equal(b.labels_BT)
            assert a.cu_seqlens.equal(b.cu_seqlens)


@pytest.mark.slow
def test_the_order_does_not_depend_on_the_preparation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real preparation beside the run: the run starts early, waits, and reads what it reads of complete shards."""
    monkeypatch.setattr(kept_shards, "PATIENCE", 60.0)
    process = start_preparation(0.1, monkeypatch)
    begun = loader(config())
    ready = len(list(Path("cache").glob("*.shards/*/meta.json")))
    assert process.is_alive() and 2 <= ready < 9, "it starts while later shards are missing"
    found = texts([begun], 6)
    state = saved([begun])
    found += texts([begun], 12)
    process.join(60)
    assert process.exitcode == 0
    assert texts([loader(config())], 18) == found
    assert texts([loader(config(), rank, 2) for rank in range(2)], 18) == found
    for size in (1, 2):
        resumed = [loader(config(), rank, size) for rank in range(size)]
        for one in resumed:
            assert not one.load_state_dict(state) and not one.new_files()
        assert texts(resumed, 12) == found[6:]


def test_a_killed_preparation_ends_the_run_and_a_second_one_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    process = start_preparation(0.3, monkeypatch)
    await_shards(process, 2)
    one = loader(config())
    found = texts([one], 1)
    (folder,) = Path("cache").glob("*.shards")
    assert kept_shards.is_being_prepared(folder)
    process.kill()
    process.join()
    assert list(folder.glob("preparing-*")) and not kept_shards.is_being_prepared(folder)
    with raises(DataError, "preparation_stopped", keys=("data.start_after",)):
        texts([one], 20)
    before = {path.stat().st_mtime_ns for path in Path("cache").glob("*.shards/*/meta.json")}
    assert prepare(config()) == 0
    after = {path.stat().st_mtime_ns for path in Path("cache").glob("*.shards/*/meta.json")}
    assert before < after, "finished shards are kept"
    assert texts([loader(config())], 1) == found


def test_parts_of_an_array_and_a_run_that_ends_before_the_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepare(config(), 0, 2) > 0
    with raises(DataError, "preparation_stopped", values=("shard 1",)):
        loader(config())
    (folder,) = Path("cache").glob("*.shards")
    monkeypatch.setattr(kept_shards, "PATIENCE", 60.0)
    assert not kept_shards.is_being_prepared(folder)
    with kept_shards.preparing(folder):
        assert kept_shards.is_being_prepared(folder)
        one = loader(config(start_after=1))

        def read() -> None:
            with raises(DataError, "preparation_stopped"):
                texts([one], 20)

        first = threading.Thread(target=read, daemon=True)
        first.start()
        time.sleep(0.2)
        one.close()  # ends the wait, so that a run does not hang at its end
        first.join(5)
        assert not first.is_alive()
    assert not list(folder.glob("preparing-*")) and prepare(config(), 1, 2) == 0
    assert texts([loader(config())], 3)


def test_without_a_preparation_and_with_damage() -> None:
    with raises(DataError, "preparation_stopped"):
        loader(config())
    prepare(config())
    shard = sorted(Path("cache").glob("*.shards/*/ids.bin"))[0]
    shard.write_bytes(shard.read_bytes()[:-2])
    with raises(DataError, "damaged_file"):
        loader(config())
    prepare(config())
    with raises(DataError, "damaged_file"):
        loader(config())
    with raises(ConfigError, "requires_setting", keys=("start_after", "streaming"), fix="data.streaming={}"):
        config(streaming=None)
    with raises(ConfigError, "out_of_range", keys=("start_after",)):
        config(start_after=0)


def test_rejected_rows_follow_the_policy(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "rows.jsonl", [*rows(0, 20), {"text": 7}, *rows(20, 40)])
    with raises(DataError, "bad_rows", values=("rows.jsonl:21",)):
        prepare(config())
    with raises(DataError, "bad_rows", values=("rows.jsonl",)):
        texts([loader(config())], 8)
    dropping = config(on_invalid_row="drop", max_invalid_fraction=0.1)
    assert prepare(dropping) == 0
    one = loader(dropping)
    texts([one], 7)
    one.check()
    assert json.dumps(one.state_dict())


def test_a_shard_of_other_data_is_refused(tmp_path: Path) -> None:
    prepare(config())
    state = saved([loader(config())])
    write_jsonl(tmp_path / "rows.jsonl", rows(1, ROWS))
    prepare(config())
    with raises(ConfigError, "checkpoint_mismatch"):
        loader(config()).load_state_dict(state)
