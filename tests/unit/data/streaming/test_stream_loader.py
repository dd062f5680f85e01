"""The order of streamed sequences: independent of ranks and of resumes, each row once a pass."""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.sources import spans
from automodel_cli.data.stream_config import StreamConfig
from automodel_cli.data.streaming import lane_reader
from automodel_cli.data.streaming.stream_loader import StreamLoader
from automodel_cli.data.streaming.streamed_data import open_streams
from automodel_cli.models.tokenizer import ByteTokenizer
from tests.errors import raises
from tests.unit.data.helpers import write_jsonl

pytestmark = pytest.mark.slow

LANES, BATCH = 4, 8
Texts = list[list[str]]


def rows(first: int, count: int) -> list[dict[str, str]]:
    return [{"text": f"row {number} " + "x" * (number * 7 % 23)} for number in range(first, first + count)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three files of 20, 1 and 37 rows."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name, first, count in (("a.jsonl", 0, 20), ("b.jsonl", 20, 1), ("c.jsonl", 21, 37)):
        write_jsonl(folder / name, rows(first, count))
    return folder


def config(path: Any, **more: Any) -> DataConfig:
    options = {"seq_len": 64, "packing": "none", "add_eos": False, "streaming": StreamConfig(LANES, block_rows=6)}
    if isinstance(path, list):
        return DataConfig(datasets=path, **{**options, **more})
    return DataConfig(path=str(path), **{**options, **more})


def loader(data: DataConfig, rank: int = 0, size: int = 1, **more: Any) -> StreamLoader:
    streamed = open_streams(data, ByteTokenizer().build())
    options = {"global_batch_size": BATCH, "batch_sizes": [BATCH], "microbatch_size": 1, **more}
    return StreamLoader(streamed.train, dp_rank=rank, dp_size=size, seed=1, **options)


def texts(ranks: Sequence[StreamLoader], steps: int) -> Texts:
    """The text of each sequence of each step, in the order of the stream."""
    decode: Callable[..., str] = ByteTokenizer().build().decode
    out: Texts = []
    for _ in range(steps):
        found: dict[int, str] = {}
        for one in ranks:
            for batch in one.next_step():
                for number, ids, labels in zip(batch.row_ids_B, batch.input_ids_BT, batch.labels_BT, strict=True):
                    found[int(number)] = decode(ids[: int((labels >= 0).sum()) + 1])
        assert sorted(found) == list(range(min(found), min(found) + BATCH)), "no entry twice"
        out.append([found[number] for number in sorted(found)])
    return out


def saved(ranks: Sequence[StreamLoader]) -> dict[str, Any]:
    """The state that all ranks together save, as a checkpoint stores it."""
    states = [one.state_dict() for one in ranks]
    lanes = [lane for state in states for lane in state["lanes"]]
    result: dict[str, Any] = json.loads(json.dumps({**states[0], "lanes": lanes}))
    return result


def test_a_pass_has_each_row_once(corpus: Path) -> None:
    data, passes = config(corpus), 3
    every = Counter(row["text"] for row in rows(0, 58))
    one = loader(data)
    lane_texts: dict[int, list[str]] = {lane: [] for lane in range(LANES)}
    for step in texts([one], 30):
        for place, text in enumerate(step):
            lane_texts[place % LANES].append(text)
    lane_sizes = [next(n for n in range(1, 60) if seen[n] in seen[:n]) for seen in lane_texts.values()]
    assert sum(lane_sizes) == 58
    for seen, size in zip(lane_texts.values(), lane_sizes, strict=True):
        of_passes = [Counter(seen[i * size : (i + 1) * size]) for i in range(passes)]
        assert of_passes[0] == of_passes[1] == of_passes[2] and set(of_passes[0].values()) == {1}
        assert seen[:size] != seen[size : 2 * size]  # another order
        every -= of_passes[0]
    assert not every


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_disjoint_lanes_of_one_order(corpus: Path, size: int) -> None:
    want = texts([loader(config(corpus))], 9)
    assert texts([loader(config(corpus), rank, size) for rank in range(size)], 9) == want


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_a_resumed_run_continues_the_order_on_any_number_of_ranks(corpus: Path, before: int, after: int) -> None:
    data = config(corpus, packing="best_fit", seq_len=48)
    want = texts([loader(data)], 18)
    for steps in (0, 4, 11):
        old = [loader(data, rank, before) for rank in range(before)]
        texts(old, steps)
        state = saved(old)
        new = [loader(data, rank, after) for rank in range(after)]
        for one in new:
            assert not one.load_state_dict(state)
        assert texts(new, 7) == want[steps : steps + 7]
        assert saved(new)["position"] == (steps + 7) * BATCH


def test_other_settings_are_refused(corpus: Path) -> None:
    state = saved([loader(config(corpus))])
    for other in (config(corpus, seq_len=32), config(corpus, streaming=StreamConfig(LANES, block_rows=4))):
        with raises(ConfigError, "checkpoint_mismatch"):
            loader(other).load_state_dict(state)
        assert loader(other).load_state_dict(state, accept_new_data=True)


def test_new_files_are_read_after_the_known_ones(corpus: Path) -> None:
    data = config(corpus)
    old = loader(data)
    seen = Counter(text for step in texts([old], 3) for text in step)
    state = saved([old])
    write_jsonl(corpus / "0.jsonl", rows(100, 16))
    new = loader(data)
    new.load_state_dict(state)
    assert new.new_files() == 1
    for step in texts([new], 8):
        seen.update(step)
    known = {row["text"] for row in rows(0, 58)}
    assert set(seen) == known | {row["text"] for row in rows(100, 16)}
    again = loader(data)
    again.load_state_dict(saved([new]))  # the files of a checkpoint keep their order
    assert again.new_files() == 1 and len(saved([again])["files"][0]) == 2


def test_removed_and_edited_files_are_refused(corpus: Path) -> None:
    state = saved([loader(config(corpus))])
    kept = (corpus / "a.jsonl").read_text()
    (corpus / "a.jsonl").write_text(kept.replace("row 3 ", "row 4 "))
    with raises(ConfigError, "checkpoint_mismatch", values=("a.jsonl",)):
        loader(config(corpus)).load_state_dict(state)
    (corpus / "a.jsonl").unlink()
    with raises(DataError, "missing_file", values=("a.jsonl",)):
        loader(config(corpus)).load_state_dict(state)


def test_every_file_type_gives_its_rows(tmp_path: Path) -> None:
    every, table = rows(0, 40), pyarrow.Table.from_pylist(rows(0, 40))
    lines = "".join(json.dumps(row) + "\n" for row in every).encode()
    (tmp_path / "rows.jsonl").write_bytes(lines)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines))
    with pyarrow.output_stream(tmp_path / "rows.jsonl.zst", compression="zstd") as file:
        file.write(lines)
    (tmp_path / "rows.json").write_text(json.dumps(every))
    (tmp_path / "rows.csv").write_text("text\n" + "".join(row["text"] + "\n" for row in every))
    (tmp_path / "rows.txt").write_text("".join(row["text"] + "\n" for row in every))
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet", row_group_size=7)
    with pyarrow.ipc.new_stream(tmp_path / "rows.arrow", table.schema) as writer:
        writer.write_table(table)
    for path in tmp_path.glob("rows.*"):
        for url in (str(path), f"file://{path}"):
            data = config(url, text_unit="line" if path.suffix == ".txt" else "file")
            found = {text.rstrip() for step in texts([loader(data)], 8) for text in step}
            assert found == {row["text"].rstrip() for row in every}, url


def test_small_spans_give_each_line_once(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "SHARD_BYTES", 100)
    one, found = loader(config(corpus)), Counter[str]()
    assert sum(order.num_shards for order in one._orders) > 8
    for step in texts([one], 7):
        found.update(step)
    assert sum(found.values()) == 56 and max(found.values()) <= 2
    assert texts([loader(config(corpus), rank, 2) for rank in range(2)], 4) == texts([loader(config(corpus))], 4)


def damage(corpus: Path) -> None:
    """One of four compressed files ends early."""
    for number in range(4):
        content = gzip.compress(b"".join(json.dumps(row).encode() + b"\n" for row in rows(number * 60, 60)))
        (corpus / f"{number}.jsonl.gz").write_bytes(content[: len(content) // 2] if number == 2 else content)
    for path in corpus.glob("*.jsonl"):
        path.unlink()


def read_all(one: StreamLoader) -> Counter[str]:
    found = Counter[str]()
    for step in texts([one], 34):
        found.update(step)
        one.check()
    return found


def test_a_damaged_shard_is_named_and_left_out(corpus: Path) -> None:
    damage(corpus)
    data = config(corpus, streaming=StreamConfig(LANES, block_rows=16))
    with raises(DataError, "damaged_file", values=("2.jsonl.gz",)):
        read_all(loader(data))
    with raises(DataError, "damaged_file", values=("2.jsonl.gz",)):
        read_all(loader(config(corpus, on_invalid_row="drop", max_invalid_fraction=0.2)))
    found = read_all(loader(config(corpus, on_invalid_row="drop", max_invalid_fraction=0.25)))
    for number in (0, 1, 3):
        assert {row["text"] for row in rows(number * 60, 60)} <= set(found)
    assert "row 179 " + "x" * (179 * 7 % 23) not in found


def test_invalid_rows_are_dropped_up_to_a_fraction(corpus: Path) -> None:
    write_jsonl(corpus / "d.jsonl", [*rows(200, 8), {"text": 7}, {"text": None}])
    with raises(DataError, "bad_rows", values=("d.jsonl",)):
        read_all(loader(config(corpus)))
    with raises(DataError, "bad_rows"):
        read_all(loader(config(corpus, on_invalid_row="drop")))
    assert read_all(loader(config(corpus, on_invalid_row="drop", max_invalid_fraction=0.5)))


def test_storage_that_fails_is_read_again(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = config(f"file://{corpus}/c.jsonl")
    want = texts([loader(data)], 6)
    monkeypatch.setattr(lane_reader, "_PAUSE", 0)
    failures = {"left": 2}  # fewer than attempts, because one lane may meet all of them
    one = loader(data)
    source = one.dataset.streams[0].source
    whole = source.rows_of

    def flaky(*args: Any) -> Any:
        for number, row in enumerate(whole(*args)):
            if number == 2 and failures["left"]:
                failures["left"] -= 1
                raise OSError("connection reset")
            yield row

    monkeypatch.setattr(source, "rows_of", flaky)
    assert texts([one], 6) == want and not failures["left"]
    failures["left"] = 1000
    other = loader(data)
    monkeypatch.setattr(other.dataset.streams[0].source, "rows_of", flaky)
    with raises(DataError, "server_rejected", values=("connection reset",)):
        texts([other], 6)


def test_blends_have_their_shares_at_every_step(tmp_path: Path) -> None:
    for name, count in (("a", 90), ("b", 30)):
        write_jsonl(tmp_path / f"{name}.jsonl", [{"text": f"{name} " * (2 + i % 9)} for i in range(count)])
    weights: list[Any] = [{0: 0.75, 20: 0.25}, {0: 0.25, 20: 0.75}]
    sources = [
        SourceConfig(str(tmp_path / f"{n}.jsonl"), sampling_weight=w) for n, w in zip("ab", weights, strict=True)
    ]
    data = config(sources)
    ranks = [loader(data, rank, 2) for rank in range(2)]
    want = texts([one := loader(data)], 40)
    assert texts(ranks, 20) == want[:20]
    half = {name: sum(len(t) for step in want[:20] for t in step if t[0] == name) for name in "ab"}
    rest = {name: sum(len(t) for step in want[20:] for t in step if t[0] == name) for name in "ab"}
    assert half["a"] / sum(half.values()) == pytest.approx(0.75, abs=LANES * 20 / sum(half.values()))
    assert rest["a"] / sum(rest.values()) == pytest.approx(0.25, abs=LANES * 20 / sum(rest.values()))
    shares = {name: float(share) for name, share in one.token_shares().items()}
    assert shares["token_share_a"] == pytest.approx((half["a"] + rest["a"]) / (sum(half.values()) + sum(rest.values())))
    state = saved(ranks)
    again = loader(data)
    again.load_state_dict(state)
    assert texts([again], 20) == want[20:]


def test_a_ramp_and_no_shuffling(corpus: Path) -> None:
    sizes = {"global_batch_size": 8, "batch_sizes": [4, 8], "batch_size": lambda at: 4 if at < 12 else 8}
    one = loader(config(corpus), shuffle=False, **sizes)
    counts = [sum(len(batch.row_ids_B) for batch in one.next_step()) for _ in range(5)]
    assert counts == [4, 4, 4, 8, 8]
    first = loader(config(corpus / "a.jsonl", streaming=StreamConfig(1)), shuffle=False)
    assert texts([first], 2) == [[row["text"] for row in rows(i * 8, 8)] for i in range(2)]


def test_lanes_divide_batch_and_ranks(corpus: Path) -> None:
    assert StreamConfig().num_lanes([64]) == 32 and StreamConfig().num_lanes([48, 72]) == 24
    with raises(ConfigError, "not_divisible"):
        StreamConfig(3).num_lanes([8])
    with raises(ConfigError, "not_divisible"):
        loader(config(corpus), 0, 8)
    few = config(corpus / "b.jsonl")
    with raises(DataError, "not_enough_rows"):
        texts([loader(few)], 1)


def test_what_cannot_be_streamed_is_refused(corpus: Path) -> None:
    both = [SourceConfig(str(corpus / "a.jsonl")), SourceConfig(str(corpus / "b.jsonl"))]
    for code, options in (
        ("unsupported_combination", {"path": corpus, "validation_size": 0.1}),
        ("requires_setting", {"path": both}),
        ("no_effect", {"path": [SourceConfig(str(corpus / "a.jsonl"), epochs=2.0)]}),
    ):
        with raises(ConfigError, code):
            config(options.pop("path"), **options)
    shutil.rmtree(corpus)
    with raises(DataError, "missing_file"):
        open_streams(config(corpus), ByteTokenizer().build())
