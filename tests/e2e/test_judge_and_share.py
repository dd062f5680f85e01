"""A run judged, talked to, served and pushed, against transformers' own generation, log-probs and server."""

from __future__ import annotations

import base64
import io
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_cli.cli.main import run
from automodel_cli.run.commands.chat import Speaker
from tests.e2e.command import automodel, cold, environment, metrics, write_config
from tests.errors import assert_error

CHOICES = [
    {"question": "Give the larger of 64 and 29.", "choices": ["64", "29"], "answer": 0},
    {"question": "Say UQ again.", "choices": ["QU", "UQ", "no"], "answer": "UQ"},
    {"question": "What is 2 + 3?", "choices": ["5", "6", "77"], "answer": "6"},
]
EVAL = """
num_resamples: 500
tasks:
  answers:
    _target_: automodel_cli.evaluation.config.Generation
    max_new_tokens: 12
  samples:
    _target_: automodel_cli.evaluation.config.Generation
    data: {path: held_out.jsonl, seq_len: 64}
    rewards: {letter: {_target_: automodel_cli.rollout.rewards.text.FormatRegex, pattern: "[A-Z].*"}}
    num_samples: 3
    temperature: 1.0
    pass_at: [1, 3]
    max_new_tokens: 4
  choices: {_target_: automodel_cli.evaluation.config.MultipleChoice, path: choices.jsonl}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    config = write_config(folder)
    config.write_text(
        config.read_text() + yaml.dump({"validation": {"every": 6, "tasks": yaml.safe_load(EVAL)["tasks"]}})
    )
    (folder / "eval.yaml").write_text(EVAL)
    (folder / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHOICES))
    rows = [
        {"messages": [{"role": "user", "content": c["question"]}, {"role": "assistant", "content": c["choices"][0]}],
         "answer": c["choices"][0]}
        for c in CHOICES
    ]  # fmt: skip
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = automodel(folder, "tiny.yaml", "train.max_steps=12", "data.generator.num_validation=5", "optimizer.lr=0.01")
    assert done.returncode == 0, done.stderr
    done = automodel(folder, "eval", "tiny", "-c", "eval.yaml")
    assert done.returncode == 0, done.stderr
    assert "answers: accuracy" in done.stdout and "tiny (step 12) minus before" in done.stdout
    return folder


def results(folder: Path, label: str = "tiny (step 12)") -> dict[str, Any]:
    return json.loads((folder / "runs/tiny/eval/eval.json").read_text())["models"][label]


def loaded(folder: Path) -> tuple[Any, Any]:
    export = folder / "runs/tiny/export"
    return AutoTokenizer.from_pretrained(export), AutoModelForCausalLM.from_pretrained(export)


def prompt(tokenizer: Any, question: str) -> torch.Tensor:
    chat = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")


@pytest.mark.slow
def test_greedy_answers_are_those_of_transformers(home: Path) -> None:
    tokenizer, model = loaded(home)
    found = results(home)["answers"]
    assert len(found["items"]) == 5
    for item, right in zip(found["items"], found["measures"]["accuracy"], strict=True):
        encoded = prompt(tokenizer, item["question"])
        said = model.generate(**encoded, max_new_tokens=12, do_sample=False)[0, encoded["input_ids"].shape[1] :]
        text = tokenizer.decode(said, skip_special_tokens=True)
        assert item["responses"] == [text]
        assert right == float(text == item["answer"] and said[-1] == tokenizer.eos_token_id)


def test_choices_are_scored_by_the_log_probs_of_their_tokens(home: Path) -> None:
    tokenizer, model = loaded(home)
    found = results(home)["choices"]
    for row, item, right in zip(CHOICES, found["items"], found["measures"]["accuracy"], strict=True):
        prefix = prompt(tokenizer, row["question"])["input_ids"][0].tolist()
        wanted = []
        for choice in row["choices"]:
            ids = tokenizer(choice, add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logprobs = model(torch.tensor([prefix + ids])).logits.log_softmax(-1)[0]
            wanted.append(sum(logprobs[len(prefix) - 1 + i, token].item() for i, token in enumerate(ids)))
        assert item["scores"] == pytest.approx(wanted, abs=1e-4)
        best = row["choices"][wanted.index(max(wanted))]
        assert item["chosen"] == best and right == float(best == item["answer"])


def test_before_is_what_the_run_began_with_and_the_report_shows_the_scores(home: Path) -> None:
    assert results(home, "before")["choices"] != results(home)["choices"]
    page = (home / "runs/tiny/report.html").read_text()
    assert "<h2>Evaluations</h2>" in page and "<td>samples: pass@3</td>" in page


def means(found: dict[str, Any]) -> dict[str, float]:
    """What a validation calls the scores of an evaluation."""
    return {
        f"val_{task}_{measure.replace('@', '_at_')}": sum(values) / len(values)
        for task, outcome in found.items()
        for measure, values in outcome["measures"].items()
    }


def test_tasks_of_a_validation_find_what_an_evaluation_finds_afterwards(home: Path) -> None:
    after, before = means(results(home)), means(results(home, "before"))
    rows = [row for row in metrics(home / "runs/tiny") if "val_loss" in row]
    assert [row["step"] for row in rows] == [6, 12]
    assert {key: value for key, value in rows[-1].items() if key not in ("step", "val_loss")} == pytest.approx(after)
    assert after["val_samples_reward"] not in (0, 1, before["val_samples_reward"]), "else it could be anything"
    assert 'aria-label="choices: accuracy"' in (home / "runs/tiny/report.html").read_text()


@pytest.mark.parametrize(
    ("words", "code", "key"),
    [
        (("validation.tasks.answers.max_new_tokens=64",), "sequence_length", "validation.tasks.answers.max_new_tokens"),
        (("validation.tasks.samples.data.seq_len=65",), "sequence_length", "validation.tasks.samples.data.seq_len"),
        (
            ("parallelizer=megatron_fsdp", "~parallelizer.mp_policy"),
            "unsupported_combination",
            "validation.tasks.answers",
        ),
        (("validation.tasks.choices.path=no.jsonl",), "missing_file", "no.jsonl"),
    ],
)
def test_tasks_that_a_run_could_not_ask_are_refused_before_it_trains(
    home: Path, words: tuple[str, ...], code: str, key: str
) -> None:
    refused = automodel(home, "tiny.yaml", *words, "run_name=refused")
    assert refused.returncode in (2, 3)
    assert_error(refused.stderr, code, values=(key,))
    assert "step 1/" not in refused.stdout


@pytest.mark.nightly
def test_tasks_of_a_pipeline_find_what_one_process_finds_on_its_export(home: Path) -> None:
    words = ("train.max_steps=12", "optimizer.lr=0.01", "mesh.pp_size=2", "pipeline=1f1b", "run_name=two")
    done = automodel(home, "tiny.yaml", *words, "data.generator.num_validation=5")
    assert done.returncode == 0, done.stderr
    (home / "own.yaml").write_text(
        EVAL.replace(
            "max_new_tokens: 12",
            "max_new_tokens: 12\n    data: &own"
            " {generator: {_target_: automodel_cli.data.synthetic.chat_tasks.ChatTasks, num_validation: 5},"
            " seq_len: 64}",
        )
    )
    done = automodel(home, "eval", "runs/two/export", "-c", "own.yaml", "--out", "two.json")
    assert done.returncode == 0, done.stderr
    found = json.loads((home / "two.json").read_text())["models"]["runs/two/export"]
    last = metrics(home / "runs/two")[-1]
    assert last["step"] == 12 and {key: last[key] for key in means(found)} == pytest.approx(means(found))


@pytest.mark.nightly
def test_two_ranks_find_what_one_found(home: Path) -> None:
    """Samples too: a question's seeds are its own, whoever asks it."""
    one = results(home)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = cold(home, "eval", "tiny", "-c", "eval.yaml", "--alone", launcher=torchrun)
    assert done.returncode == 0, done.stderr
    two = results(home)
    assert two["answers"] == one["answers"] and two["samples"] == one["samples"]
    for a, b in zip(one["choices"]["items"], two["choices"]["items"], strict=True):
        assert a["scores"] == pytest.approx(b["scores"], abs=1e-4)


@pytest.mark.parametrize("together", [False, True])
def test_chat_says_what_transformers_generates_and_lines_of_a_pipe_share_a_conversation_on_demand(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], together: bool
) -> None:
    tokenizer, model = loaded(home)
    lines = ("Say UQ again.", "And now?", "/new", "Say UQ again.")
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    asked: list[list[str]] = []
    answer = Speaker.answer

    def watched(speaker: Speaker, question: str, options: dict[str, Any], pictures: list[Any]) -> Iterator[str]:
        asked.append([*(message["content"] for message in speaker.messages), question])
        return answer(speaker, question, options, pictures)

    monkeypatch.setattr(Speaker, "answer", watched)
    words = ["--one-conversation"] if together else []
    assert run(["chat", "tiny", "--max-new-tokens", "6", *words]) == 0
    said = [line for line in capsys.readouterr().out.splitlines()[1:] if not line.startswith("> ")]
    chat: list[dict[str, str]] = []
    wanted = []
    for question in ("Say UQ again.", "And now?"):
        chat = [*(chat if together else []), {"role": "user", "content": question}]
        encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        answered = model.generate(**encoded, max_new_tokens=6, do_sample=False)[0, encoded["input_ids"].shape[1] :]
        chat.append({"role": "assistant", "content": tokenizer.decode(answered, skip_special_tokens=True)})
        wanted.append(chat[-1]["content"])
    assert "\n".join(said) == "\n".join([*wanted, wanted[0]])
    second = [lines[0], wanted[0], lines[1]] if together else [lines[1]]
    assert asked == [[lines[0]], second, [lines[3]]]


@pytest.mark.nightly
def test_chat_with_unmerged_adapters_beside_their_base_says_what_peft_and_transformers_generate(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    peft = pytest.importorskip("peft")
    lora = ("model.pretrained=runs/tiny/export", "model.config=null", "model.tokenizer=null", "model.lora={rank: 4}")
    words = ("run_name=adapters", "train.max_steps=8", "optimizer.lr=0.05", "~validation.tasks", *lora)
    done = automodel(home, "tiny.yaml", *words)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(home)
    Path("runs/adapters/export/model.safetensors").unlink()  # the merged weights, which are not asked
    question, adapter = "Say UQ again.", Path("runs/adapters/export/adapter")
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{question}\n"))
    assert run(["chat", "adapters", "--unmerged", "--compare", "tiny", "--max-new-tokens", "6"]) == 0
    said = capsys.readouterr().out
    tokenizer, base = loaded(home)
    encoded = prompt(tokenizer, question)

    def answer(model: Any) -> str:
        tokens = model.generate(**encoded, max_new_tokens=6, do_sample=False)[0, encoded["input_ids"].shape[1] :]
        return tokenizer.decode(tokens, skip_special_tokens=True)

    with torch.no_grad():
        of_base, plain = answer(base), base(**encoded).logits
        theirs = peft.PeftModel.from_pretrained(base, str(adapter)).eval()
        assert f"[adapters] {answer(theirs)}\n[tiny] {of_base}\n" in said
        ours = Speaker.load("adapters", "runs/tiny/export", adapter=adapter).model(**encoded).logits
        assert torch.allclose(ours, theirs(**encoded).logits, atol=1e-5) and (ours - plain).abs().max() > 0.01
    assert_error(automodel(home, "chat", "tiny", "--unmerged").stderr, "wrong_recipe", "--unmerged")
    assert_error(automodel(home, "chat", "tiny", "--image", "x.png").stderr, "wrong_model_kind", "--image")


def test_an_answer_comes_in_pieces_as_it_is_generated(home: Path) -> None:
    speaker = Speaker.load("tiny", str(home / "runs/tiny/export"))
    pieces = list(speaker.answer("Say UQ again.", {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}))
    assert len(pieces) > 1 and speaker.messages[-1] == {"role": "assistant", "content": "".join(pieces)}


HUB = "https://huggingface.co/me/tiny"


class Hub(BaseHTTPRequestHandler):
    """The routes of the hub that an upload of small files takes (huggingface_hub 2: create, preupload, commit)."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, body))  # type: ignore[attr-defined]
        if self.path.endswith("/preupload/main"):
            files = [{"path": f["path"], "uploadMode": "regular"} for f in json.loads(body)["files"]]
            answer: dict[str, Any] = {"files": [{**file, "shouldIgnore": False} for file in files]}
        elif self.path.endswith("/commit/main"):
            answer = {
                "success": True,
                "commitOid": "0" * 40,
                "commitUrl": f"{HUB}/commit/0",
                "hookOutput": "",
            }
        elif self.path == "/api/validate-yaml":
            answer = {"errors": [], "warnings": []}
        else:
            answer = {"url": HUB, "name": "me/tiny", "id": "1"}
        self._reply(answer)

    def do_GET(self) -> None:
        self._reply({"id": "me/tiny", "sha": "0" * 40, "siblings": []})

    def _reply(self, answer: dict[str, Any]) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: Any) -> None:
        pass


def test_push_commits_the_export_with_its_card_to_a_stand_in_of_the_hub(home: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.asked = []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        hub = {"HF_ENDPOINT": url, "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0", "HF_HOME": str(home / "hf")}
        command = [sys.executable, "-m", "automodel_cli", "push", "tiny", "me/tiny", "--private", "--license", "mit"]
        said = subprocess.run(
            command, cwd=home, env=environment(home) | hub, capture_output=True, text=True, check=False
        )
    finally:
        server.shutdown()
    assert said.stdout.startswith("pushed to "), said.stderr
    asked = dict(server.asked)  # type: ignore[attr-defined]
    created = json.loads(asked["/api/repos/create"])
    assert created.get("visibility") == "private" or created.get("private") is True, "as older libraries say it"
    lines = [json.loads(line) for line in asked["/api/models/me/tiny/commit/main"].splitlines()]
    sent = {e["value"]["path"]: base64.b64decode(e["value"]["content"]) for e in lines if e["key"] == "file"}
    export = home / "runs/tiny/export"
    assert sent["model.safetensors"] == (export / "model.safetensors").read_bytes()
    assert set(sent) >= {path.name for path in export.iterdir() if path.is_file()} | {"loss.svg"}
    card = sent["README.md"].decode()
    assert "license: mit" in card and "![loss](loss.svg)" in card and "held" not in card.partition("---")[0]
    assert "answers: accuracy" in card and "automodel finetune llm -c tiny.yaml" in card and str(home) not in card


def test_push_can_be_looked_at_first(home: Path) -> None:
    said = automodel(home, "push", "tiny", "me/tiny", "--dry-run")
    assert "nothing was sent" in said.stdout and "model.safetensors" in said.stdout
    assert_error(automodel(home, "push", "tiny", "tiny").stderr, "invalid_value", values=("tiny", "owner/name"))


@pytest.mark.nightly
@pytest.mark.skipif(not (find_spec("fastapi") and find_spec("uvicorn") and shutil.which("curl")), reason="no server")
def test_the_curl_line_of_serve_works(home: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "automodel_cli", "serve", "tiny", "--port", str(port), "--with", "transformers"]
    log = (home / "serve.log").open("w+")
    with subprocess.Popen(command, cwd=home, env=environment(home), stdout=log, stderr=log) as server:
        try:
            line = ""
            for _ in range(240):
                line = next((x for x in (home / "serve.log").read_text().splitlines() if x.startswith("curl ")), "")
                health = ["curl", "-s", "-o", "/dev/null", f"http://127.0.0.1:{port}/health"]
                if line and subprocess.run(health, check=False).returncode == 0:
                    break
                time.sleep(0.5)
            answer = subprocess.run(line, shell=True, capture_output=True, text=True, check=False).stdout
        finally:
            server.terminate()
    assert json.loads(answer)["choices"][0]["message"]["role"] == "assistant", answer
