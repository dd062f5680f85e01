"""What tests of real servers (tests/vllm, tests/sglang) have in common: a small model, a server of it, a run."""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.rollout.engines.base import Engine
from automodel_cli.rollout.engines.sampler.sampling import shaping_of
from automodel_cli.rollout.engines.servers.server_process import ServerProcess, answers
from automodel_cli.rollout.http import Server
from automodel_cli.rollout.types import Completion, SamplingParams
from tests.tiny import perturb
from tests.unit.rollout.engines.servers.test_http_engine_servers import free_port

RUN = """
defaults: [grpo, {data: chat_tasks}, {override rewards: none}, _self_]
model: {pretrained: MODEL}
data: {seq_len: 128}
rollout: {prompts_per_step: 4, group_size: 4, max_new_tokens: 16, log_samples_every: null, engine: {timeout: 60,
retries: 1}}
rewards:
  digits: {_target_: automodel_cli.rollout.rewards.text.FormatRegex, pattern: ".*[0-9].*", timeout: null}
parallelizer:
  mp_policy: {param_dtype: float32}
optimizer: {lr: 3e-3}
train: {global_batch_size: 16, microbatch_size: 1, max_steps: 8, epochs: null, num_cpu_threads: 1}
validation: {num_batches: 8}
checkpoint: {every: 2}
logging: {report: false}
"""


class Served(ABC):
    """A server at one address that can be killed and started again."""

    start_timeout: float

    def __init__(self, model: Path, folder: Path):
        self.server = Server(f"http://127.0.0.1:{free_port()}", timeout=60, retries=0)
        self.port = self.server.url.rsplit(":", 1)[1]
        self.folder = folder
        self.command = self.command_for(model)
        self.process: ServerProcess | None = None

    @abstractmethod
    def command_for(self, model: Path) -> list[str]:
        """What serves it at `port`."""

    def up(self) -> Self:
        if self.process is None or not answers(self.server.url):
            self.end()
            log = self.folder / f"server-{self.port}.log"
            self.process = ServerProcess(self.command, self.server, log, timeout=self.start_timeout)
        return self

    def kill(self) -> None:
        assert self.process is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process._process.pid, signal.SIGKILL)

    def end(self) -> None:
        if self.process is not None:
            self.process.close()
            self.process = None


def built(vocab_size: int | None = None) -> Qwen3ForCausalLM:
    """Heads of 32, which vLLM's CPU kernels take, and an untied output layer: vLLM's CPU build does not reload a tied
    one."""
    tokenizer = ByteTokenizer().build()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size or len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.06,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def saved(folder: Path) -> Path:
    """`built()` in `folder`, with a generation_config.json that recommends what no run of ours wants."""
    model = built()
    recommended = {"top_k": 20, "top_p": 0.95, "temperature": 0.6, "do_sample": True, "repetition_penalty": 1.3}
    model.generation_config.update(**recommended, eos_token_id=model.config.eos_token_id)
    model.save_pretrained(folder)
    ByteTokenizer().build().save_pretrained(folder)
    return folder


def weights_of(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def moved(seed: int) -> Qwen3ForCausalLM:
    model = built()
    perturb(model, seed)
    return model


def prompts() -> list[list[int]]:
    tokenizer = ByteTokenizer().build()
    return [list(tokenizer(text)["input_ids"]) for text in ("What is 1 + 1?", "Repeat AB.", "shared " * 20 + "end")]


def largest_gap(engine: Engine, model: torch.nn.Module, params: SamplingParams, samples: int = 4) -> float:
    """Between the log-probs that the server reports of its tokens and those of the model in this process."""
    asked = [prompt for prompt in prompts() for _ in range(samples)]
    found = engine.generate(asked, params, list(range(len(asked))))
    worst = 0.0
    for prompt, completion in zip(asked, found, strict=True):
        drawn_T = torch.tensor(completion.tokens)
        with torch.no_grad():
            logits_TV = model(torch.tensor([[*prompt, *completion.tokens]])).logits[0, len(prompt) - 1 : -1]
        logprobs_T = shaping_of(params)(logits_TV, drawn_T).log_softmax(-1).gather(-1, drawn_T[:, None])[:, 0]
        worst = max(worst, (logprobs_T - torch.tensor(completion.logprobs)).abs().max().item())
    return worst


@torch.no_grad()
def gap_of_versions(models: Sequence[Qwen3ForCausalLM], prompt: list[int], completion: Completion) -> float:
    """The largest gap to the log-probs of the model whose number is the version of the token."""
    ids = torch.tensor([[*prompt, *completion.tokens]])
    rows = [model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1) for model in models]
    of_models = torch.stack([row.gather(-1, torch.tensor(completion.tokens)[:, None])[:, 0] for row in rows])
    wanted_T = of_models.gather(0, torch.tensor(completion.versions)[None])[0]
    return (wanted_T - torch.tensor(completion.logprobs)).abs().max().item()
