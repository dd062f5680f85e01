"""Rewards behind HTTP, with real servers on this machine."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from automodel_cli.config.errors import ConfigError
from automodel_cli.rollout.http import ServerError
from automodel_cli.rollout.rewards.aggregate import RewardSum
from automodel_cli.rollout.rewards.base import RewardInput
from automodel_cli.rollout.rewards.remote import ModelJudge, ScoreServer
from tests.errors import raises

ASKED: list[tuple[str, dict[str, Any], str | None]] = []


class Scorer(BaseHTTPRequestHandler):
    """Scores by length; judges what the instruction says of the answer "good"."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ASKED.append((self.path, body, self.headers.get("Authorization")))
        if self.path == "/score":
            completions = [sample["completion"] for sample in body["samples"]]
            answer: Any = {"scores": [len(text) for text in completions]}
            if "broken" in completions:
                answer = {"score": 1}
        else:
            text = body["messages"][0]["content"]
            said = "I like it. Rating: 8" if "good" in text else "no idea"
            answer = {"choices": [{"message": {"role": "assistant", "content": said}}]}
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    ASKED.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Scorer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def judged(completion: str, group: int = 0, **row: object) -> RewardInput:
    question = {"role": "user", "content": "2 + 2?"}
    return RewardInput(f"sample of {group}", completion, dict(row), [question], group=group)


def test_a_server_scores_batches_in_order(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_KEY", "secret")
    rewards = RewardSum({"far": ScoreServer(url=url, batch_size=2, concurrency=2, api_key_env="MY_KEY")})
    samples = [judged("x" * n, group=n // 3, answer=n) for n in range(5)]
    assert [score.total for score in rewards(samples)] == [0, 1, 2, 3, 4]
    assert sorted(len(body["samples"]) for _, body, _ in ASKED) == [1, 2, 2]
    assert {key for _, _, key in ASKED} == {"Bearer secret"}
    sent = next(body["samples"][0] for _, body, _ in ASKED if body["samples"][0]["completion"] == "")
    assert sent == {
        "completion": "",
        "messages": [{"role": "user", "content": "2 + 2?"}],
        "row": {"answer": 0},
        "group": 0,
    }


def test_groups_can_travel_whole(url: str):
    reward = ScoreServer(url=url, batch_size=2, whole_groups=True)
    RewardSum({"far": reward})([judged("a", 0), judged("b", 0), judged("c", 0), judged("d", 1)])
    assert sorted([s["group"] for s in body["samples"]] for _, body, _ in ASKED) == [[0, 0, 0], [1]]


def test_an_answer_of_another_form_is_an_error_of_its_samples(url: str):
    (score,) = RewardSum({"far": ScoreServer(url=url)})([judged("broken")])
    assert 'not {"scores": [1 numbers]}' in score.errors["far"]


def test_a_server_that_is_gone_is_named_by_the_key_of_the_reward():
    with raises(ServerError, "server_unreachable", values=("http://localhost:1/score",)) as caught:
        ScoreServer(url="http://localhost:1", retries=0).scores([judged("a")])
    assert caught.value.fix == "start the server, or set url"


def test_a_model_judges_and_one_without_a_number_is_an_error(url: str):
    text = "Question: {question} Right: {answer} Said: {completion}. Rate from 0 to 10."
    judge = ModelJudge(url=url, model="m", instruction=text, pattern=r"Rating: (\d+)")
    assert judge.columns == ("answer",)
    good, bad = RewardSum({"judge": judge})([judged("good {answer}", answer="4"), judged("bad", answer="4")])
    assert good.total == 0.8 and "said no number: 'no idea'" in bad.errors["judge"]
    path, body, _ = next(asked for asked in ASKED if "good" in asked[1]["messages"][0]["content"])
    assert path == "/v1/chat/completions" and body["temperature"] == 0.0
    assert body["messages"][0]["content"] == "Question: 2 + 2? Right: 4 Said: good {answer}. Rate from 0 to 10."


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("3/10", 3),
        ("Score: 3 / 10.", 3),
        ("I give it 7 out of 10", 7),
        ("Out of 10, this is a 7.", 7),
        ("8.5/10", 8.5),
        ("10/10", 10),
        ("Rating: 4 (on a scale of 0 to 10)", 4),
        ("On a scale from 1 to 10 I say 6.", 6),
        ("6 on a 1-10 scale", 6),
        ("The first part is worth 2, all in all 5", 5),
        ("**9**", 9),
        ("[[7]]", 7),
        ("12", 12),
        ("0", 0),
    ],
)
def test_the_default_pattern_reads_the_score_and_not_its_scale(said: str, expected: float):
    assert (
        float(re.findall(ModelJudge(url="http://x", model="m", instruction="{completion}").pattern, said)[-1])
        == expected
    )


def test_what_cannot_work_is_refused_before_the_first_rollout():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        with raises(ConfigError, "server_unreachable", keys=("url",)):
            RewardSum({"far": ScoreServer(url=f"http://127.0.0.1:{taken.getsockname()[1]}")})
    with raises(ConfigError, "invalid_value", keys=("url",), values=("localhost:8000",)):
        ScoreServer(url="localhost:8000")
    with raises(ConfigError, "invalid_value", keys=("instruction",)):
        ModelJudge(url="http://x", model="m", instruction="Rate it")
