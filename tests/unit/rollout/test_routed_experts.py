"""What engines tell of experts, and how it reaches a batch: against the experts that a whole forward calls."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.data.batch import ROUTED_EXPERTS, one_document
from automodel_cli.data.preparation.prompt_dataset import Prompt
from automodel_cli.distributed.expert_parallel.apply import experts_modules
from automodel_cli.models.attention.packed import packed_attention
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.moe.router_hooks import Routing, install_routing, mark_selections, selectors_of
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.rollout.collection.queue_checkpoint import pack_samples, unpacked
from automodel_cli.rollout.config import RolloutConfig
from automodel_cli.rollout.config_checks import check_routing_engine
from automodel_cli.rollout.engines.config import VLLMConfig
from automodel_cli.rollout.engines.sampler.decoder import Decoder
from automodel_cli.rollout.engines.sampler.sampler import Sampler
from automodel_cli.rollout.engines.servers.sglang import SGLangEngine
from automodel_cli.rollout.engines.servers.sglang_config import SGLangConfig
from automodel_cli.rollout.engines.servers.vllm import VLLMEngine
from automodel_cli.rollout.engines.transformers_engine import HFEngine
from automodel_cli.rollout.http import Server
from automodel_cli.rollout.minibatches.router_replay import RoutingReplay
from automodel_cli.rollout.routed_experts import (
    compact_indices,
    decode_experts,
    first_known,
    from_int32,
    from_text,
    join_layers,
    to_text,
)
from automodel_cli.rollout.samples import PackingConfig, pack_minibatches
from automodel_cli.rollout.types import Completion, Sample, SamplingParams, Score
from automodel_cli.rollout.weight_sync.transports import FileTransfer
from tests import tiny
from tests.dist.parity import tiny_part
from tests.errors import raises
from tests.unit.rollout.engines.servers.test_http_engine_servers import VLLMDouble
from tests.unit.rollout.engines.servers.test_sglang import SGLangDouble

STOP = list(range(2, 160, 6))
PARAMS = SamplingParams(max_new_tokens=9, seed=4, routing=True)


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3"])
def part(request) -> ModelPart:
    part = tiny_part(request.param)
    install_routing([part], selectors_of(part.source_config), torch.device("cpu"))
    return part


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randint(3, tiny.VOCAB, (n,), generator=generator).tolist() for n in (7, 1, 12)]
    return [prompt for prompt in drawn for _ in range(2)]  # two samples of one prompt share its prefill


def replica_of(part: ModelPart) -> Any:
    replica: Any = copy.deepcopy(part.model)
    for module in replica.modules():
        module.__dict__.pop("forward", None)  # a copy of what was installed belongs to the model that was copied
    replica.set_attn_implementation("eager")
    mark_selections(replica, selectors_of(part.source_config))
    return replica


def called_experts(part: ModelPart, tokens: Sequence[int]) -> Tensor:
    """`[T, L, K]`, sorted: what the experts of each layer are called with when all tokens are read at once."""
    seen: list[Tensor] = []
    handles = [e.register_forward_pre_hook(lambda _, args: seen.append(args[1])) for e in experts_modules(part)]
    batch = one_document(list(tokens))
    with torch.no_grad():
        part(labels=batch.labels_BT, **batch.model_inputs())
    for handle in handles:
        handle.remove()
    return torch.stack(seen, 1).sort(-1).values


def sorted_experts(completion: Completion) -> Tensor:
    assert completion.routed_experts is not None and completion.routed_experts.dtype == np.uint8
    return torch.from_numpy(np.sort(completion.routed_experts.astype(np.int64)))


@pytest.mark.parametrize("max_num_seqs", [2, 8])
def test_the_sampler_tells_the_experts_of_every_token_that_it_read(part, prompts, max_num_seqs):
    sampler = Sampler(Decoder.from_part(part), packed_attention, stop_token_ids=STOP, max_num_seqs=max_num_seqs)
    found = sampler.generate(prompts, PARAMS)
    for prompt, completion in zip(prompts, found, strict=True):
        want = called_experts(part, [*prompt, *completion.tokens])[:-1]
        assert torch.equal(sorted_experts(completion), want)
    assert {c.finish_reason for c in found} == {"stop", "length"} and len({len(c.tokens) for c in found}) > 2
    silent = sampler.generate(prompts, SamplingParams(max_new_tokens=9, seed=4))
    assert [c.tokens for c in silent] == [c.tokens for c in found]
    assert all(c.routed_experts is None for c in silent)


def test_the_librarys_generate_tells_the_same(part, prompts):
    engine = HFEngine(replica_of(part), stop_token_ids=STOP, pad_token_id=0)
    for prompt, completion in zip(prompts, engine.generate(prompts, PARAMS), strict=True):
        want = called_experts(part, [*prompt, *completion.tokens])[:-1]
        assert torch.equal(sorted_experts(completion), want)
    assert engine.generate(prompts[:1], SamplingParams(max_new_tokens=2, seed=4))[0].routed_experts is None


def test_what_is_kept_of_a_token_is_the_choice_when_it_was_read_first():
    first, second = np.arange(8, dtype=np.uint8).reshape(4, 1, 2), np.full((6, 1, 2), 9, np.uint8)
    found = first_known(first, second)
    assert found is not None and found.tolist() == [*first.tolist(), *second[4:].tolist()]
    assert first_known(None, first) is first and first_known(first, None) is first


def test_stages_of_a_pipeline_are_joined_in_the_order_of_layers():
    even, odd = np.full((3, 2, 2), 4, np.int16), np.full((3, 1, 2), 7, np.int16)
    nothing = np.zeros((3, 0, 0), np.int16)
    found = join_layers([((0, 2), even), ((1,), odd), ((), nothing)])
    assert found.shape == (3, 3, 2) and found[:, :, 0].tolist() == [[4, 7, 4]] * 3


def test_a_byte_holds_an_expert_where_there_are_few():
    assert compact_indices(np.array([[[0, 255]]])).dtype == np.uint8
    assert compact_indices(np.array([[[0, 256]]])).dtype == compact_indices(np.array([[[0, -1]]])).dtype == np.int16
    wide = np.array([[[3, 511]]], np.int16)
    assert np.array_equal(from_text(to_text(wide)), wide)


def test_a_checkpoint_keeps_the_experts_of_samples_that_wait():
    chosen = np.arange(10, dtype=np.uint8).reshape(5, 1, 2)
    waiting = {
        (3, 0): Completion([4, 5], [-0.5, -1.0], "stop", 2, routed_experts=chosen),
        (3, 1): Completion([4], [-0.5], "length", 2),
    }
    found = unpacked(json.loads(json.dumps(pack_samples(waiting))))
    assert found == waiting and found[3, 1].routed_experts is None
    assert np.array_equal(found[3, 0].routed_experts, chosen) and found[3, 0].routed_experts.dtype == np.uint8


def test_a_row_holds_the_experts_of_its_samples_and_nothing_elsewhere():
    prompts = [Prompt(0, [11, 12, 13], [], {}, "0"), Prompt(1, [14], [], {}, "1")]
    chosen = np.arange(1, 17, dtype=np.uint8).reshape(4, 2, 2)
    known = {"score": Score(1.0, {}, {}), "text": "", "finish_reason": "stop", "weight_version": 0}
    samples = [
        Sample(0, 0, prompts[0], tokens=[21, 22], logprobs=[-1.0, -1.0], routed_experts=chosen, **known),
        Sample(1, 0, prompts[1], tokens=[23], logprobs=[-1.0], **known),
    ]
    plan = PackingConfig(seq_len=10, packed=True, pad_to_multiple_of=1, microbatch_size=1, pad_id=0)
    (update,) = pack_minibatches(samples, [(0,), (1,)], 1, plan, dp_rank=0, dp_size=1)
    (batch,) = update.batches
    column_TC = batch.extra[ROUTED_EXPERTS][0]
    (start,) = (first - 2 for _, first, number in update.spread[0] if number == 0)
    assert column_TC.dtype == torch.int16 and column_TC.shape == (10, 4)
    assert torch.equal(column_TC[start : start + 4], torch.from_numpy(chosen.astype(np.int16)).flatten(1))
    assert (column_TC >= 0).all(1).sum() == 4  # not the sample's last token, the other sample, or padding
    bare = [Sample(1, 0, prompts[1], tokens=[23], logprobs=[-1.0], **known)]
    (update,) = pack_minibatches(bare, [(0,)], 1, plan, dp_rank=0, dp_size=1)
    assert ROUTED_EXPERTS not in update.batches[0].extra


def test_experts_of_all_layers_are_those_of_the_layers_that_have_some(part):
    routing = part.routing
    assert isinstance(routing, Routing)
    num_layers = routing.num_slots
    every = np.arange(3 * num_layers * 2, dtype=np.uint8).reshape(3, num_layers, 2)
    assert np.array_equal(routing.of_layers(every), every[:, list(routing.slots)])
    dense = num_layers - len(routing.slots)
    assert routing.slots == tuple(range(dense, num_layers))


OF_VLLM = (
    "k05VTVBZAQB2AHsnZGVzY3InOiAnfHUxJywgJ2ZvcnRyYW5fb3JkZXInOiBGYWxzZSwgJ3NoYXBlJzogKDIsIDMsIDIpLCB9ICAgICAgICAgICAg"
    "ICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgIAoAAQIDBAUGBwgJCgs="
)
"""What `vllm.utils.serial_utils.numpy2base64` of vLLM 0.32.0 makes of uint8 0 to 11 in the shape (2, 3, 2)."""


def test_what_vllm_writes_is_read():
    assert np.array_equal(from_text(OF_VLLM), np.arange(12, dtype=np.uint8).reshape(2, 3, 2))


@pytest.mark.parametrize("scale_out", [True, False])
def test_vllm_tells_the_experts_of_every_token_that_it_read(part, prompts, scale_out):
    tokenizer = ByteTokenizer().build()
    oracle = HFEngine(replica_of(part), stop_token_ids=STOP, pad_token_id=0)
    double = VLLMDouble(oracle)
    double.scale_out, routing = scale_out, part.routing
    assert routing is not None
    try:
        silent = VLLMEngine(Server(double.url), tokenizer, FileTransfer(Path("unused")))
        rollout = RolloutConfig(engine=VLLMConfig(url=double.url), replay_routing=True)
        with raises(ConfigError, "server_mismatch", keys=("rollout.replay_routing",)) as error:
            check_routing_engine(rollout, silent.capabilities)
        assert "--enable-return-routed-experts" in str(error.value)
        double.moe_layers = [layer in routing.slots for layer in range(routing.num_slots)]
        engine = VLLMEngine(Server(double.url), tokenizer, FileTransfer(Path("unused")))
        check_routing_engine(rollout, engine.capabilities)
        found = engine.generate(prompts, PARAMS)
    finally:
        double.server.shutdown()
    for prompt, completion in zip(prompts, found, strict=True):
        chosen = routing.of_layers(completion.routed_experts)
        want = called_experts(part, [*prompt, *completion.tokens])[:-1]
        assert torch.equal(torch.from_numpy(np.sort(chosen).astype(np.int64)), want)


OF_SGLANG = "AAAAAAEAAAACAAAAAwAAAAQAAAAFAAAABgAAAAcAAAAIAAAACQAAAAoAAAALAQAA"
"""What `DetokenizerManager._b64_encode_per_request` of SGLang 0.5.23 makes of int32 0 to 10 and 267."""


def test_sglang_tells_the_experts_of_every_token_that_it_read(part, prompts):
    assert from_int32(OF_SGLANG).tolist() == [*range(11), 267]
    tokenizer, routing = ByteTokenizer().build(), part.routing
    assert routing is not None
    double = SGLangDouble(HFEngine(replica_of(part), stop_token_ids=STOP, pad_token_id=0))
    double.vocabulary = len(tokenizer)
    config = SGLangConfig(url=double.url)
    rollout = RolloutConfig(engine=config, replay_routing=True)

    def engine(num_layers: int = routing.num_slots) -> SGLangEngine:
        return SGLangEngine(Server(double.url), tokenizer, FileTransfer(Path("unused")), num_layers=num_layers)

    try:
        with raises(ConfigError, "server_mismatch", keys=("rollout.replay_routing",)) as error:
            check_routing_engine(rollout, engine().capabilities)
        assert "sglang.launch_server --model-path MODEL --enable-return-routed-experts" in str(error.value)
        double.info["enable_return_routed_experts"] = True
        double.moe_layers = [layer in routing.slots for layer in range(routing.num_slots)]
        with raises(ConfigError, "server_mismatch", keys=("rollout.engine.url",), values=("7 layers",)):
            engine(7)
        check_routing_engine(rollout, engine().capabilities)
        found = engine().generate(prompts, PARAMS)
        assert engine().generate(prompts[:1], SamplingParams(2))[0].routed_experts is None
        double.info["pp_size"] = 2
        with raises(ConfigError, "unsupported_combination", keys=("rollout.replay_routing",), values=("pp_size=2",)):
            engine().generate(prompts, PARAMS)
        assert engine().generate(prompts[:1], SamplingParams(2))
    finally:
        double.server.shutdown()
    for prompt, completion in zip(prompts, found, strict=True):
        chosen = routing.of_layers(completion.routed_experts)
        want = called_experts(part, [*prompt, *completion.tokens])[:-1]
        assert torch.equal(torch.from_numpy(np.sort(chosen).astype(np.int64)), want)


def test_experts_of_other_tokens_than_were_read_are_refused():
    with raises(RunError, "invalid_response", values=(3, 2)):
        decode_experts(OF_VLLM, 3, from_text, start="serve")
    with raises(RunError, "invalid_response", keys=("rollout.replay_routing",), fix="serve"):
        decode_experts(None, 3, from_text, start="serve")


def test_an_expert_that_is_told_twice_of_a_token_is_no_choice():
    """Before the first step: a server that does not know of a layer tells 0 of it."""
    chosen = np.array([[[1, 0], [2, 3]], [[0, 4], [0, 0]]], np.uint8)
    known = {"score": Score(1.0, {}, {}), "text": "", "finish_reason": "stop", "weight_version": 0}
    prompt = Prompt(0, [11, 12], [], {}, "0")
    sample = Sample(0, 0, prompt, tokens=[21], logprobs=[-1.0], routed_experts=chosen[:1], **known)
    RoutingReplay.check_recorded([sample, dataclasses.replace(sample, routed_experts=None)])
    RoutingReplay.check_recorded([dataclasses.replace(sample, routed_experts=np.array([[[-1, -1]]], np.int16))])
    with raises(
        RunError, "invalid_response", keys=("rollout.replay_routing",), values=("expert 0", "token 1", "layer 1")
    ):
        RoutingReplay.check_recorded([dataclasses.replace(sample, routed_experts=chosen)])
