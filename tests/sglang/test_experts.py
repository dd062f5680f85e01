"""A real SGLang server of a mixture of experts on the CPU: the experts that it tells, and runs that replay them.

The model computes in float32 on both sides, so the server's routers choose what the trainer's choose on the same
weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from automodel_cli.distributed.expert_parallel.apply import experts_modules
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.rollout.engines.servers.server_process import answers
from automodel_cli.rollout.engines.servers.sglang import SGLangEngine
from automodel_cli.rollout.types import SamplingParams
from automodel_cli.rollout.weight_sync.transports import FileTransfer
from tests.e2e.command import automodel, curve
from tests.real_servers import RUN, prompts
from tests.sglang.server import MARKS, OPTIONS, PROGRAM, SGLangServed
from tests.tiny import perturb
from tests.unit.rollout.engines.servers.test_http_engine_servers import free_port

pytestmark = MARKS
PARAMS = SamplingParams(24, routing=True)


def built() -> Qwen3MoeForCausalLM:
    tokenizer = ByteTokenizer().build()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.06,
        norm_topk_prob=True,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3MoeForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    built().save_pretrained(folder)
    ByteTokenizer().build().save_pretrained(folder)
    return folder


class TellsExperts(SGLangServed):
    def command_for(self, model: Path) -> list[str]:
        """See `Served`."""
        return [*super().command_for(model), "--enable-return-routed-experts"]


@pytest.fixture(scope="module")
def served(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServed]:
    one = TellsExperts(model_folder, tmp_path_factory.mktemp("served")).up()
    yield one
    one.end()


@pytest.fixture
def engine(served: SGLangServed, tmp_path: Path) -> SGLangEngine:
    tokenizer = ByteTokenizer().build()
    stops = [tokenizer.eos_token_id]
    return SGLangEngine(served.server, tokenizer, FileTransfer(tmp_path), stop_token_ids=stops, num_layers=3)


@torch.no_grad()
def own_choice(model: Qwen3MoeForCausalLM, tokens: Sequence[int]) -> Tensor:
    """`[T, L, K]`, sorted: what the experts of each layer are called with."""
    seen: list[Tensor] = []
    handles = [e.register_forward_pre_hook(lambda _, args: seen.append(args[1])) for e in experts_modules(model)]
    model(torch.tensor([list(tokens)]))
    for handle in handles:
        handle.remove()
    return torch.stack(seen, 1).sort(-1).values


def hub_weights(model: Qwen3MoeForCausalLM, folder: Path) -> list[tuple[str, Tensor]]:
    """As a checkpoint names them: each expert's by itself."""
    model.save_pretrained(folder)
    return list(load_file(folder / "model.safetensors").items())


def test_the_experts_it_tells_are_those_of_the_models_own_routers(engine: SGLangEngine, tmp_path: Path) -> None:
    assert engine.capabilities.routing
    asked = [prompt for prompt in prompts() for _ in range(3)]
    for seed in (1, 2):  # the prompts of the second are in the prefix cache of the first
        model = built()
        perturb(model, seed)
        engine.update_weights([hub_weights(model, tmp_path / f"model-{seed}")])
        num_read = 0
        for prompt, completion in zip(asked, engine.generate(asked, PARAMS, list(range(len(asked)))), strict=True):
            assert completion.routed_experts is not None and completion.routed_experts.dtype == np.uint8
            found = torch.from_numpy(np.sort(completion.routed_experts.astype(np.int64)))
            assert torch.equal(found, own_choice(model, [*prompt, *completion.tokens])[:-1])
            num_read += len(found)
        assert num_read > 300
    assert engine.generate(asked[:1], SamplingParams(4))[0].routed_experts is None


def test_a_run_replays_what_servers_of_its_own_tell(model_folder: Path, tmp_path: Path) -> None:
    """It starts two, on the CPU. Weights that are up to two steps old choose other experts than the trainer's."""
    config, port = yaml.safe_load(RUN.replace("MODEL", str(model_folder))), free_port()
    own = {"num_servers": 2, "gpus_per_server": 0, "port": port, "dtype": "float32"}
    own |= {"executable": PROGRAM, "extra_args": OPTIONS}
    config["rollout"]["engine"]["servers"] = own
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    words = ["rollout=sglang", "rollout.replay_routing=true"]
    words += ["rollout.engine.transport=broadcast", f"rollout.engine.port={free_port()}"]
    words += [
        "rollout.max_off_policy_steps=2",
        "objective.sampler_correction=truncate",
        "objective.sampler_correction_clip_max=2.0",
    ]
    done = automodel(tmp_path, "grpo", "llm", "-c", "run.yaml", *words, "--trust", "command", timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "run"
    idle = curve(run, "engine_idle_fraction")
    assert curve(run, "live_servers") == [2] * 8 and 0 < idle[0] < 1 and all(0 <= share <= 1 for share in idle)
    mismatch, gaps = curve(run, "routing_mismatch"), curve(run, "logprob_abs_diff")
    assert mismatch[0] == 0 and max(mismatch[2:]) > 0.02, mismatch
    assert gaps[0] < 1e-5 and curve(run, "logprob_abs_diff_without_replay")[0] < 1e-5
    assert gaps[2:] != curve(run, "logprob_abs_diff_without_replay")[2:] and curve(run, "staleness")[-1] > 0
    assert not any(answers(f"http://127.0.0.1:{port + number}") for number in range(2))
