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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from automodel_cli.cli.main import run
from tests.e2e.command import automodel, cold, environment, write_config

CHOICES = [
    {"question": "Give the larger of 64 and 29.", "choices": ["64", "29"], "answer": 0},
    {"question": "Say UQ again.", "choices": ["QU", "UQ", "no"], "answer": "UQ"},
    {"question": "What is 2 + 3?", "choices": ["5", "6", "77"], "answer": "6"},
]
EVAL = """
_target_: automodel_cli.evaluation.config.EvalConfig
num_resamples: 500
tasks:
  answers:
    _target_: automodel_cli.evaluation.config.Generation
    max_new_tokens: 12
  samples:
    _target_: automodel_cli.evaluation.config.Generation
    data: {path: held_out.jsonl, seq_len: 64}
    num_samples: 3
    temperature: 1.0
    pass_at: [1, 3]
    max_new_tokens: 4
  choices: {_target_: automodel_cli.evaluation.config.MultipleChoice, path: choices.jsonl}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    write_config(folder)
    (folder / "eval.yaml").write_text(EVAL)
    (folder / "choices.jsonl").write_text("".join(json.dumps(row) + "\n" for row in CHOICES))
    rows = [
        {"messages": [{"role": "user", "content": c["question"]}, {"role": "assistant", "content": c["choices"][0]}],
         "answer": c["choices"][0]}
        for c in CHOICES
    ]  # fmt: skip
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = automodel(folder, "tiny.yaml", "train.max_steps=12", "data.task.num_validation=5", "optimizer.lr=0.01")
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


@pytest.mark.slow
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


def test_chat_says_what_transformers_generates_and_keeps_the_conversation(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer, model = loaded(home)
    lines = "Say UQ again.\nAnd now?\n/new\nSay UQ again.\n"
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert run(["chat", "tiny", "--max-new-tokens", "6"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines()[1:] if not line.startswith("> ")]
    chat: list[dict[str, str]] = []
    wanted = []
    for question in ("Say UQ again.", "And now?"):
        chat.append({"role": "user", "content": question})
        encoded = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        answer = model.generate(**encoded, max_new_tokens=6, do_sample=False)[0, encoded["input_ids"].shape[1] :]
        chat.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
        wanted.append(chat[-1]["content"])
    assert "\n".join(said) == "\n".join([*wanted, wanted[0]])


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
    assert "no repository: owner/name is expected" in automodel(home, "push", "tiny", "tiny").stderr


@pytest.mark.slow
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
