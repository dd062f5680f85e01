"""Prompts: what is read from a row, what is refused, how they are dealt; the settings of a rollout."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.data.config import DataConfig
from automodel_cli.data.preparation.dataloader import BatchLoader
from automodel_cli.data.preparation.prompts import prepare_prompts
from automodel_cli.data.synthetic.chat_tasks import ChatTasks
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.rollout.config import DynamicSampling, OverlongConfig, RolloutConfig
from automodel_cli.rollout.engines.config import HFConfig, SamplerConfig, ServerConfig
from tests.errors import raises

TOKENIZER = ByteTokenizer().build()


def read(folder: Path, rows: list[dict], max_tokens: int = 64, **options):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(path=str(path), cache_dir=str(folder / "cache"), **{"truncation": "drop", **options})
    return prepare_prompts(config, TOKENIZER, seed=0, max_tokens=max_tokens)


def test_the_answer_is_left_out_and_the_row_kept(tmp_path):
    user, said = {"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}
    rows = [
        {"messages": [user, said], "answer": "4"},
        {"prompt": "2 + 2", "answer": "4"},
        {"prompt": [user], "answer": "4"},
        {"conversations": [{"from": "human", "value": "2 + 2"}, {"from": "gpt", "value": "4"}]},
    ]
    prompts = read(tmp_path, rows).train.prompts
    assert [TOKENIZER.decode(p.tokens) for p in prompts] == ["<|user|>2 + 2<|end|><|assistant|>"] * 4
    assert [p.row for p in prompts] == rows and [p.messages for p in prompts] == [[user]] * 4
    assert [p.origin for p in prompts] == [f"rows.jsonl:{line}" for line in range(1, 5)]


def test_a_format_that_is_named_reads_prompts_too(tmp_path):
    data = read(tmp_path, [{"instruction": "1 + 1", "input": "in words", "output": "two"}], format="alpaca")
    assert TOKENIZER.decode(data.train.prompts[0].tokens) == "<|user|>1 + 1\nin words<|end|><|assistant|>"
    assert "rows.jsonl (alpaca): 1 prompts" in data.report.lines()[0]


def test_columns_name_the_prompt(tmp_path):
    data = read(
        tmp_path, [{"question": "1 + 1", "answer": "2", "hint": "Be short."}], column_mapping={"prompt": "question"}
    )
    assert TOKENIZER.decode(data.train.prompts[0].tokens) == "<|user|>1 + 1<|end|><|assistant|>"
    data = read(
        tmp_path, [{"question": "1 + 1", "hint": "Be short."}], column_mapping={"prompt": "question", "system": "hint"}
    )
    assert TOKENIZER.decode(data.train.prompts[0].tokens).startswith("<|system|>Be short.<|end|>")


def test_a_row_without_a_prompt_is_named(tmp_path):
    with raises(DataError, "bad_rows", values=("rows.jsonl:2", "'prompt'")):
        read(tmp_path, [{"prompt": "a"}, {"question": "b"}])
    with raises(DataError, "bad_rows", values=("rows.jsonl:1", "no message")):
        read(tmp_path, [{"messages": [{"role": "assistant", "content": "4"}]}])


def test_prompts_without_room_are_dropped_or_refused(tmp_path):
    rows = [{"prompt": "short"}, {"prompt": "much too long for this row"}]
    data = read(tmp_path, rows, max_tokens=12)
    assert len(data.train) == 1 and data.report.num_dropped == 1
    with raises(DataError, "sequence_length", keys=("data.seq_len",), values=("rows.jsonl:2", 12)):
        read(tmp_path, rows, max_tokens=12, truncation="error")


@pytest.mark.parametrize("samples_per_row", [1, 2])
def test_the_length_that_is_advised_keeps_every_prompt(tmp_path, samples_per_row):
    """8 tokens stay free for each response; with two samples in a row each has half of it."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": "word " * n}) + "\n" for n in (1, 40, 200)))

    def prepared(seq_len: int, path: str = "rows.jsonl"):
        config = DataConfig(path=str(tmp_path / path), cache_dir=str(tmp_path / "cache"), seq_len=seq_len)
        config = dataclasses.replace(config, truncation="drop")
        room = seq_len // samples_per_row - 8
        return prepare_prompts(config, TOKENIZER, seed=0, max_tokens=room, samples_per_row=samples_per_row)

    found = re.search(r"data.seq_len=(\d+) keeps all of them", "\n".join(prepared(64).report.lines()))
    assert found is not None
    assert prepared(int(found[1])).report.num_dropped == 0 and prepared(int(found[1]) - 128).report.num_dropped == 1
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "word " * 200}) + "\n")
    with raises(DataError, "not_enough_rows", values=("long.jsonl", 1), fix=f"data.seq_len={found[1]}"):
        prepared(64, "long.jsonl")


def test_validation_rows_are_apart(tmp_path):
    data = read(tmp_path, [{"prompt": str(i)} for i in range(20)], validation_size=5)
    asked = {p.number for p in data.train.prompts}, {p.number for p in data.validation.prompts}
    assert (len(asked[0]), len(asked[1])) == (15, 5) and not asked[0] & asked[1]


def test_every_rank_gets_its_share_of_one_stream():
    task = ChatTasks(num_train=50, num_validation=4)
    data = prepare_prompts(DataConfig(generator=task, truncation="drop"), TOKENIZER, seed=0, max_tokens=64)

    def steps(dp_size: int) -> list[list[int]]:
        loaders = [
            BatchLoader(data.train, global_batch_size=8, microbatch_size=1, dp_rank=rank, dp_size=dp_size)
            for rank in range(dp_size)
        ]
        found = []
        for _ in range(3):
            shares = [[p.number for of_batch in loader.next_step() for p in of_batch] for loader in loaders]
            found.append([number for turn in zip(*shares, strict=True) for number in turn])
        return found

    assert steps(1) == steps(2) == steps(4)


@pytest.mark.parametrize(
    ("overlong", "reward", "num_tokens", "truncated", "expected"),
    [
        (OverlongConfig(), 1.0, 100, True, 1.0),
        (OverlongConfig(buffer=20), 1.0, 80, False, 1.0),
        (OverlongConfig(buffer=20), 1.0, 90, False, 0.5),
        (OverlongConfig(buffer=20, penalty=2.0), 0.0, 100, True, -2.0),
        (OverlongConfig(factor=0.25), 1.0, 100, True, 0.25),
        (OverlongConfig(factor=0.25), 1.0, 100, False, 1.0),
    ],
)
def test_overlong_responses(overlong, reward, num_tokens, truncated, expected):
    assert overlong.shaped(reward, num_tokens, truncated, 100) == pytest.approx(expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: RolloutConfig(temperature=0.0),
        lambda: RolloutConfig(group_size=1),
        lambda: RolloutConfig(warn_token_mult_prob_error=1.0),
        lambda: RolloutConfig(max_new_tokens=8, overlong=OverlongConfig(buffer=9)),
        lambda: RolloutConfig(engine=ServerConfig(url="http://localhost:1")),
        lambda: RolloutConfig(max_off_policy_steps=1, engine=SamplerConfig()),
        lambda: RolloutConfig(max_off_policy_steps=-1, engine=HFConfig()),
        lambda: OverlongConfig(penalty=2.0),
        lambda: OverlongConfig(factor=1.5),
        lambda: DynamicSampling(max_gen_batches=0),
    ],
)
def test_wrong_settings_are_refused(make):
    with pytest.raises(ConfigError) as error:
        make()
    assert error.value.fix


def test_greedy_measurement_and_sampling_share_the_limit():
    config = RolloutConfig(max_new_tokens=7, temperature=0.5, top_p=0.9, engine=SamplerConfig())
    assert config.params().top_p == 0.9 and config.params(greedy=True).greedy
    assert config.params().max_new_tokens == config.params(greedy=True).max_new_tokens == 7
