"""The meter's rows and lines, trackers with the real package, config nodes."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path

import pytest
import torch

from automodel_cli.config.errors import ConfigError
from automodel_cli.training.config import CheckpointConfig, LoggingConfig, ProfileConfig, ValidationConfig
from automodel_cli.training.metrics import metric_logger as meter_module
from automodel_cli.training.metrics.metric_logger import Machine, MetricLogger
from automodel_cli.training.metrics.peak_memory import max_over_ranks, peak_memory_gib
from automodel_cli.training.metrics.progress import (
    LiveDisplay,
    PlainDisplay,
    aligned,
    show_count,
    show_duration,
    show_number,
    step_text,
)
from automodel_cli.training.metrics_file import read_metrics
from automodel_cli.training.monitors.profiling import StepProfiler
from automodel_cli.training.trackers import TensorBoard, flatten_config
from automodel_cli.training.train_config import TrainConfig
from tests.errors import raises

KEYS = {
    "step",
    "loss",
    "grad_norm",
    "lr",
    "num_label_tokens",
    "num_tokens",
    "tokens_per_second",
    "step_seconds",
    "memory_gib",
    "mfu",
}


class Clock:
    """Stands in for time.perf_counter, so that rates can be compared exactly."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(meter_module.time, "perf_counter", clock)
    return clock


def record(meter: MetricLogger, step: int, **changed) -> None:
    row = {"loss": torch.tensor(3.0 - 0.1 * step), "grad_norm": torch.tensor(0.5), "lr": 1e-3}
    row |= {"num_label_tokens": torch.tensor(100), "num_tokens": 600}
    meter.step(step, **{**row, **changed})


def rows_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_rows_have_the_documented_keys_and_rates_start_with_the_second_step(tmp_path, clock, capsys):
    machine = Machine(num_ranks=2, flops_per_token=1e9, peak_flops=1e12)
    meter = MetricLogger(tmp_path, LoggingConfig(console="plain"), num_steps=3, machine=machine)
    meter.start()
    for step, seconds in ((1, 50.0), (2, 2.0), (3, 4.0)):
        clock.now += seconds
        record(meter, step, memory_gib=1.25)
        assert len(rows_of(tmp_path)) == step  # on disk at once
    meter.close()
    rows = rows_of(tmp_path)
    assert [set(row) for row in rows] == [KEYS] * 3
    assert [row["tokens_per_second"] for row in rows] == [None, 300.0, 150.0]
    assert [row["mfu"] for row in rows] == [None, pytest.approx(0.15), pytest.approx(0.075)]
    assert [row["step_seconds"] for row in rows] == [50.0, 2.0, 4.0]
    assert meter.summary()["tokens_per_second"] == 200.0
    assert capsys.readouterr().out.splitlines() == [
        "step 1/3  loss 2.900  gnorm 0.500  lr 1.00e-03  mem 1.2 GiB",
        "step 2/3  loss 2.800  gnorm 0.500  lr 1.00e-03  300 tok/s (150/rank)  MFU 15%  mem 1.2 GiB  eta 2s",
        "step 3/3  loss 2.700  gnorm 0.500  lr 1.00e-03  150 tok/s (75/rank)  MFU 8%  mem 1.2 GiB",
    ]


def test_every_prints_less_but_writes_every_step(tmp_path, clock, capsys):
    meter = MetricLogger(tmp_path, LoggingConfig(every=3, console="plain"), num_steps=7)
    for step in range(1, 8):
        clock.now += 1.0
        record(meter, step)
        assert meter.due(step) == (step in (1, 3, 6, 7))
    meter.close()
    assert [row["step"] for row in rows_of(tmp_path)] == list(range(1, 8))
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["1/7", "3/7", "6/7", "7/7"]


def test_tensors_are_not_fetched_before_a_line_is_due(tmp_path, monkeypatch):
    meter = MetricLogger(tmp_path, LoggingConfig(every=4, console="plain"), num_steps=8)
    record(meter, 1)
    fetched = []
    monkeypatch.setattr(meter_module, "_fetch", lambda values: fetched.append(1) or {"num_tokens": 1})
    for step in (2, 3):
        record(meter, step)
    assert fetched == []
    meter._pending.clear()
    meter.close()


def test_the_share_of_waiting_for_data(tmp_path, clock, capsys):
    """Of all steps since the last line, without pauses."""
    meter = MetricLogger(tmp_path, LoggingConfig(every=2, console="plain"), num_steps=4)
    for step, wait in ((1, 0.0), (2, 0.5), (3, torch.tensor(0.02)), (4, 0.02)):
        clock.now += 1.0
        record(meter, step, data_seconds=wait)
        with meter.pause():
            clock.now += 5.0
    meter.close()
    rows = rows_of(tmp_path)
    assert [row["data_wait_share"] for row in rows] == pytest.approx([0.0, 0.5, 0.02, 0.02])
    assert not any("data_seconds" in row for row in rows)
    assert ["data wait" in line for line in capsys.readouterr().out.splitlines()] == [False, True, False]


def test_pauses_count_for_no_step_and_validation_has_its_own_row(tmp_path, clock, capsys):
    meter = MetricLogger(tmp_path, LoggingConfig(console="plain"), num_steps=2)
    clock.now += 1.0
    record(meter, 1)
    with meter.pause():
        clock.now += 500.0
        meter.validation(1, val_loss=torch.tensor(2.5), val_num_label_tokens=7)
    clock.now += 2.0
    record(meter, 2, reward=0.25)
    meter.footer([("saved", "runs/x\nand more")])
    rows = rows_of(tmp_path)
    assert rows[1] == {"step": 1, "val_loss": 2.5, "val_num_label_tokens": 7}
    assert rows[2]["step_seconds"] == 2.0 and rows[2]["reward"] == 0.25 and rows[2]["memory_gib"] is None
    out = capsys.readouterr().out.splitlines()
    assert out[1] == "step 1/2  val loss 2.500"
    assert out[2].startswith("step 2/2  reward 0.250  loss 2.800")
    assert out[-3:] == ["done     2 steps in 8m23s   loss 2.800 (val 2.500)", "saved    runs/x", "         and more"]


def test_resume_removes_the_rows_of_lost_steps_and_a_line_cut_short(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": s, "loss": s / 3}) for s in (1, 2, 3, 4)]
    lines.insert(2, json.dumps({"step": 2, "val_loss": 9.0}))
    path.write_text("\n".join(lines) + '\n{"step": 5, "lo')
    meter = MetricLogger(tmp_path, LoggingConfig(console="plain"), num_steps=4, resume_step=2)
    record(meter, 3)
    meter.close()
    rows = rows_of(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 2, 3]
    assert rows[0]["loss"] == 1 / 3  # bitwise
    assert rows[3]["tokens_per_second"] is None and "loss" in rows[3]


def test_numbers_that_json_lacks_are_null(tmp_path):
    meter = MetricLogger(tmp_path, LoggingConfig(console="plain"), num_steps=1)
    record(meter, 1, loss=torch.tensor(float("nan")), grad_norm=float("inf"))
    meter.close()
    row = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert row["loss"] is None and row["grad_norm"] is None


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    meter = MetricLogger(tmp_path / "run", LoggingConfig(trackers=["tensorboard"]), num_steps=2, is_main=False)
    record(meter, 1)
    meter.validation(1, val_loss=1.0)
    meter.header([("model", "x")])
    meter.footer()
    meter.close()
    assert capsys.readouterr().out == "" and not (tmp_path / "run").exists()


def test_live_line_is_redrawn_in_place_and_other_lines_scroll():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    display = LiveDisplay(20, 0, stream)
    for step in (1, 2):
        display.step(step, f"loss {step}.500", 90.0)
    display.line("step 2/20  val loss [1]")
    display.close()
    text = stream.getvalue()
    assert "step 2/20" in text and "loss 2.500  eta 1m30s" in text and "val loss [1]" in text


@pytest.mark.parametrize("make", [lambda stream: LiveDisplay(20, 0, stream), lambda stream: PlainDisplay(20, stream)])
def test_a_line_that_quotes_a_sample_sends_the_terminal_nothing(make):
    stream = io.StringIO()
    display = make(stream)
    display.line("reward: \x1b]0;owned\x07 \x9b2J\u202e")
    display.close()
    assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(stream.getvalue())
    assert r"\x1b]0;owned\x07" in stream.getvalue()


def test_a_line_of_reinforcement_learning_leads_with_the_reward():
    row = {"step": 1, "loss": 0.02, "grad_norm": 0.5, "lr": 1e-3, "tokens_per_second": None, "mfu": None}
    row |= {"memory_gib": None, "clip_fraction": 0.0, "reward": 0.5, "response_length": 3.0}
    row |= {"entropy": 0.25, "token_mult_prob_error": 1.0}
    assert step_text(row, 1) == (
        "reward 0.500  length 3.000  entropy 0.250  mismatch 1.000  loss 0.02  gnorm 0.500  lr 1.00e-03  "
        "clip_fraction 0.0"
    )
    assert step_text({**row, "rewards_rejected": math.nan}, 1) == step_text(row, 1)  # no such response in the step
    nothing = {**row, "loss": math.nan, "grad_norm": math.nan}
    assert "  no update: no group had different rewards  lr" in step_text(nothing, 1)
    assert "nan" not in step_text(nothing, 1)
    assert step_text({**nothing, "num_groups": 8, "num_zero_std_groups": 8}, 1) == step_text(nothing, 1)
    untaken = step_text({**nothing, "num_groups": 8, "num_zero_std_groups": 5}, 1)
    assert "  no update: none of the samples is taken (objective.threshold, " in untaken
    unjudged = step_text({**nothing, "reward": math.nan}, 1)
    assert "  no update: every sample was left out after an error  lr" in unjudged and "nan" not in unjudged


def test_numbers_as_people_write_them():
    assert [show_duration(s) for s in (0.4, 59.6, 273, 7500)] == ["0s", "1m00s", "4m33s", "2h05m"]
    assert [show_count(n) for n in (12, 11_312, 2.4e6)] == ["12", "11.3k", "2.4M"]
    assert [show_number(n) for n in (3, 0.0, 1.5, 1e-5, 12345.678, None)] == [
        "3",
        "0.0",
        "1.500",
        "1e-05",
        "1.23e+04",
        "n/a",
    ]
    assert aligned([("model", "a"), ("long label", "b")]) == ["model      a", "long label b"]
    assert aligned([]) == []


def test_tensorboard_gets_every_number(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = LoggingConfig(trackers=["tensorboard"], console="plain")
    meter = MetricLogger(tmp_path, config, num_steps=2, tracked_config={"optimizer": {"lr": 1e-3}})
    for step in (1, 2):
        record(meter, step)
    meter.validation(2, val_loss=1.5)
    meter.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = [(e.step, e.value) for e in events.Scalars("loss")]
    assert losses == [(1, pytest.approx(2.9)), (2, pytest.approx(2.8))]
    assert events.Scalars("val_loss")[0].value == 1.5
    assert "mfu" not in events.Tags()["scalars"]
    assert flatten_config({"a": {"b": 1}, "c": [2]}) == {"a.b": 1, "c": [2]}


def test_a_tracker_that_is_not_installed_says_what_to_install(monkeypatch):
    monkeypatch.setattr(TensorBoard, "module", "no_such_module_at_all")
    with raises(ConfigError, "missing_package", keys=("trackers",), fix="pip install tensorboard"):
        LoggingConfig(trackers=["tensorboard"])


def test_profiler_writes_one_trace_of_its_steps(tmp_path):
    profiler = StepProfiler(ProfileConfig(start_step=2, num_steps=2), tmp_path, rank=0)
    for step in range(1, 5):
        profiler.before(step)
        torch.ones(step, step) @ torch.ones(step, step)
        profiler.after(step)
    profiler.close()
    trace = json.loads((tmp_path / "profile" / "rank-0.json").read_text())
    shapes = [e["args"]["Input Dims"][0] for e in trace["traceEvents"] if e.get("name") == "aten::mm"]
    assert shapes == [[2, 2], [3, 3]]
    other = StepProfiler(ProfileConfig(), tmp_path / "none", rank=1)
    other.before(3)
    other.close()
    assert not (tmp_path / "none").exists()


def test_memory_is_the_resident_peak_on_cpu():
    before = peak_memory_gib(torch.device("cpu"))
    block = torch.ones(64, 2**20)  # 256 MiB
    assert peak_memory_gib(torch.device("cpu")) >= max(before, 0.25) and block.sum() > 0
    assert max_over_ranks(1.5, torch.device("cpu")) == 1.5


def test_length_of_the_run():
    assert TrainConfig(8, max_steps=5).num_steps(100) == 5
    assert TrainConfig(8, epochs=1.5).num_steps(3) == 5
    assert TrainConfig(8, epochs=2, max_steps=5).num_steps(2) == 4
    assert TrainConfig(8, microbatch_size=2, epochs=1).num_microbatches(2) == 2


@pytest.mark.parametrize(
    ("make", "code", "keys", "fix"),
    [
        (lambda: TrainConfig(8), "missing_key", ("max_steps", "epochs"), "train.epochs=1"),
        (lambda: TrainConfig(0, epochs=1), "out_of_range", ("global_batch_size",), "train.global_batch_size=1"),
        (
            lambda: TrainConfig(9, 8, epochs=1),
            "not_divisible",
            ("global_batch_size", "microbatch_size"),
            "train.microbatch_size=3",
        ),
        (
            lambda: TrainConfig(8, epochs=1).num_microbatches(3),
            "not_divisible",
            ("global_batch_size", "microbatch_size"),
            "train.global_batch_size=9",  # no number of rows divides 8 samples over 3 ranks
        ),
        (
            lambda: TrainConfig(12, 4, epochs=1).num_microbatches(2),
            "not_divisible",
            ("global_batch_size", "microbatch_size"),
            "train.microbatch_size=3",  # the step stays what it is
        ),
        (lambda: ValidationConfig(every=0), "out_of_range", ("every",), "validation.every=1"),
        (lambda: CheckpointConfig(resume=" "), "empty_value", ("resume",), "checkpoint.resume=auto"),
        (lambda: ProfileConfig(ranks=()), "empty_value", ("ranks",), "logging.profile.ranks=[0]"),
    ],
)
def test_config_nodes_reject_fields_with_a_fix(make, code, keys, fix):
    with raises(ConfigError, code, fix=fix) as caught:
        make()
    assert caught.value.keys == keys and caught.value.fix == fix


def test_when_validation_and_checkpoints_are_due():
    validation = ValidationConfig(every=2, at_end=True)
    assert [s for s in range(6) if validation.due(s, 5)] == [2, 4, 5]
    assert ValidationConfig(at_start=True, at_end=False).due(0, 5)
    assert [s for s in range(1, 6) if CheckpointConfig(every=2).due(s, 5)] == [2, 4, 5]
    assert not CheckpointConfig(save_final=False).due(5, 5)
