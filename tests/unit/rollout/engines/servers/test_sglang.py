"""SGLang's client, against a server that takes what the release's own definitions take and nothing else.

The fields are those that scripts/signatures.py read from the wheel. What is served is computed by a real model, and
weights that it is given are put into it. tests/sglang asks the same of a real SGLang, and broadcasts to it.
"""

from __future__ import annotations

import base64
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.models.tokenizer import ByteTokenizer
from automodel_cli.rollout.config import RolloutConfig
from automodel_cli.rollout.engines.servers.colocated import SharedGPUs
from automodel_cli.rollout.engines.servers.live_pool import LivePool
from automodel_cli.rollout.engines.servers.sglang import SGLangEngine
from automodel_cli.rollout.engines.servers.sglang_config import SGLangConfig
from automodel_cli.rollout.engines.transformers_engine import HFEngine
from automodel_cli.rollout.http import Server
from automodel_cli.rollout.types import SamplingParams
from automodel_cli.rollout.weight_sync.transports import FileTransfer
from tests import tiny
from tests.errors import raises
from tests.signatures import SIGNATURES, bind
from tests.unit.rollout.engines.servers.test_http_engine_servers import Refused, VLLMDouble, build_model, make_oracle

TAKEN = {
    "/generate": "GenerateReqInput",
    "/pause_generation": "PauseGenerationReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
GREEDY = SamplingParams(max_new_tokens=8, temperature=0.0)


class SGLangDouble(VLLMDouble):
    """SGLang's routes in front of an `HFEngine`."""

    def __init__(self, oracle: HFEngine):
        self.info = {"version": "0.5.23", "tp_size": 1, "dp_size": 1, "pp_size": 1, "sampling_mask_max_tokens": 64}
        self.info["enable_return_routed_experts"] = False
        self.vocabulary = oracle.model.config.vocab_size
        super().__init__(oracle)

    def handle(self, path, body):
        hook = self.hooks.get(path)
        if hook is not None and (answer := hook(body)) is not None:
            return answer
        if path not in SIGNATURES["sglang"]["routes"]:
            raise Refused(404, "Not Found")
        if path in TAKEN:
            try:
                bind("sglang", TAKEN[path], **body)
            except TypeError as error:
                raise Refused(400, str(error)) from error
        if path == "/generate":
            return self.drawn(body)
        if path == "/update_weights_from_disk":
            files = sorted(Path(body["model_path"]).glob("*.safetensors"))
            self.oracle.update_weights([list(load_file(file).items()) for file in files])
        if path == "/update_weight_version":
            assert body["abort_all_requests"] is False
            self.weight_version = body["new_version"]
        if path == "/release_memory_occupation":
            self.asleep |= set(body["tags"])
        if path == "/resume_memory_occupation":
            self.asleep -= set(body["tags"])
        told = {"/server_info": self.info, "/model_info": {"weight_version": self.weight_version}}
        return told.get(path, {"success": True})

    def drawn(self, body):
        asked = body["sampling_params"]
        bind("sglang", "SamplingParams", **asked)
        if self.asleep:
            raise Refused(500, f"asleep: {self.asleep}")
        if max(body.get("token_ids_logprob", [0])) >= self.vocabulary:
            said = f"token_ids_logprob contains out-of-vocabulary token id; valid range is [0, {self.vocabulary})."
            raise Refused(400, said)
        if asked["top_k"] == 0:
            raise Refused(400, "top_k must be -1 (disable) or at least 1")
        top_k = max(asked["top_k"], 0)
        routing = body["return_routed_experts"] and self.info["enable_return_routed_experts"]
        shape = (asked["max_new_tokens"], asked["temperature"], asked["top_p"], top_k)
        params = SamplingParams(*shape, routing=routing)
        with self.step if routing else nullcontext():  # what it records is of one forward at a time
            (found,) = self.oracle.generate([body["input_ids"]], params, [asked["sampling_seed"]])
        # its log-probs leave filters out of account, other than those that come with the mask
        plain = [
            [value - (5.0 if top_k else 0.0), token, None]
            for value, token in zip(found.logprobs, found.tokens, strict=True)
        ]
        told = {
            "finish_reason": {"type": found.finish_reason},
            "output_token_logprobs": plain,
            "weight_versions": [{"version": self.weight_version, "start": 0, "end": len(found.tokens)}],
        }
        if body["return_sampling_mask"]:
            told["output_token_sampling_logprobs"] = found.logprobs
        if routing:  # as `DetokenizerManager._b64_encode_per_request`
            numbers = self.of_all_layers(found).astype(np.int32)
            told["routed_experts"] = base64.b64encode(numbers.tobytes()).decode("utf-8")
        return {"output_ids": found.tokens, "meta_info": told, "prompt_token_ids": self.reads(body["input_ids"])}


@pytest.fixture(scope="module")
def tokenizer():
    return ByteTokenizer().build()


@pytest.fixture
def doubles(tokenizer):
    doubles = [SGLangDouble(make_oracle(tokenizer)) for _ in range(2)]
    yield doubles
    for double in doubles:
        double.server.shutdown()
        double.server.server_close()


@pytest.fixture
def double(doubles):
    return doubles[0]


def engine_at(double, tokenizer, transfer, **options) -> SGLangEngine:
    server = Server(double.url, timeout=20, backoff=0.01, **options)
    return SGLangEngine(server, tokenizer, transfer, stop_token_ids=[tokenizer.eos_token_id])


@pytest.mark.parametrize("params", [SamplingParams(6, temperature=0.7), SamplingParams(6, top_k=8), GREEDY], ids=str)
def test_tokens_and_logprobs_are_those_of_the_distribution_drawn_from(double, tokenizer, tmp_path, params):
    prompts = [[7, 8, 9], [30, 31]]
    want = make_oracle(tokenizer).generate(prompts, params, [5, 6])
    got = engine_at(double, tokenizer, FileTransfer(tmp_path)).generate(prompts, params, [5, 6])
    assert [c.tokens for c in got] == [c.tokens for c in want]
    for ours, theirs in zip(got, want, strict=True):
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
        assert ours.prompt_tokens is None and ours.finish_reason == theirs.finish_reason


def test_a_request_says_all_that_shapes_the_distribution(double, tokenizer, tmp_path):
    """`--preferred-sampling-params` of the server fill in the rest."""
    engine_at(double, tokenizer, FileTransfer(tmp_path)).generate([[7]], GREEDY)
    sent = dict(double.calls)["/generate"]["sampling_params"]
    internal = {"is_normalized", "stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len"}
    constraints = {"stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "ebnf_full_assistant"}
    about_text = {"spaces_between_special_tokens", "stream_interval"}
    others = {"beam_width", "logit_bias", "custom_params", "watermark"}
    taken = set(SIGNATURES["sglang"]["SamplingParams"]["optional"])
    assert taken - internal - constraints - about_text - others == sent.keys()


def test_weights_by_files_and_answers_that_say_their_version(double, tokenizer, tmp_path):
    engine, trained = engine_at(double, tokenizer, FileTransfer(tmp_path)), build_model(tokenizer)
    tiny.perturb(trained, 5)
    named = [(name, p.detach()) for name, p in trained.named_parameters()]
    for _ in range(2):
        double.calls.clear()
        engine.update_weights(iter([named[:3], named[3:]]))
    paths = ["/model_info", "/pause_generation", "/update_weights_from_disk", "/update_weight_version"]
    assert [path for path, _ in double.calls] == [*paths, "/continue_generation"]
    assert double.calls[1][1] == {"mode": "retract"}, "keys and values of running requests could not be dropped"
    (got,) = engine.generate([[7, 8, 9]], GREEDY)
    want = HFEngine(trained, stop_token_ids=[tokenizer.eos_token_id], pad_token_id=0).generate([[7, 8, 9]], GREEDY)
    assert got.tokens == want[0].tokens and got.weight_version == 2 and not list(tmp_path.iterdir())
    double.weight_version = "default"
    with raises(RunError, "server_mismatch", keys=("rollout.engine.url",), fix="automodel resume RUN"):
        engine.generate([[7, 8, 9]], GREEDY)


def test_weights_that_the_server_refuses_end_the_update_and_it_goes_on(double, tokenizer, tmp_path):
    engine = engine_at(double, tokenizer, FileTransfer(tmp_path))

    def refuse(body):
        raise Refused(400, '{"success": false, "message": "Failed to update weights: 354 != 400"}')

    double.hooks["/update_weights_from_disk"] = refuse
    with raises(RunError, "server_rejected", values=(400, 354)):
        engine.update_weights([[("w", torch.zeros(1))]])
    assert double.calls[-1][0] == "/continue_generation" and engine.weight_version == 0


def test_a_completion_that_is_broken_off_is_asked_for_again(double, tokenizer, tmp_path):
    engine, reasons = engine_at(double, tokenizer, FileTransfer(tmp_path), retries=1), ["abort"]

    def broken_off(body):
        answer = double.drawn(body)
        return (
            answer | {"meta_info": answer["meta_info"] | {"finish_reason": {"type": reasons.pop()}}}
            if reasons
            else None
        )

    double.hooks["/generate"] = broken_off
    assert engine.generate([[7, 8, 9]], GREEDY)[0].finish_reason in ("stop", "length") and not reasons
    reasons += ["abort"] * 2
    with raises(RunError, "invalid_response", values=("abort", 2)):
        engine.generate([[7, 8, 9]], GREEDY)


def test_a_completion_that_is_cut_before_its_limit_is_no_sample(double, tokenizer, tmp_path):
    """SGLang shortens `max_new_tokens` to what its context has room for, and says `length`."""
    engine = engine_at(double, tokenizer, FileTransfer(tmp_path))

    def cut(body):
        body["sampling_params"]["max_new_tokens"] = 3
        return double.drawn(body)

    double.hooks["/generate"] = cut
    assert len(engine.generate([[7, 8, 9]], SamplingParams(3))[0].tokens) <= 3
    with raises(RunError, "server_mismatch", keys=("rollout.max_new_tokens",), values=(3, 8)) as error:
        engine.generate([[7, 8, 9]], SamplingParams(8, temperature=0.0))
    assert error.value.fix == "python -m sglang.launch_server --model-path MODEL --context-length 17"


def test_other_servers_and_vocabularies_are_refused_before_a_step(double, tokenizer, tmp_path):
    files = FileTransfer(tmp_path)
    double.info["version"] = "0.5.20.post1"
    with raises(ConfigError, "version_mismatch", values=("0.5.20.post1",)):
        engine_at(double, tokenizer, files)
    double.info["version"] = "0.6.0"
    engine_at(double, tokenizer, files)
    double.vocabulary = len(tokenizer) - 1
    with raises(ConfigError, "vocabulary_mismatch", keys=("rollout.engine.url",)):
        engine_at(double, tokenizer, files)
    del double.info["version"]
    with raises(ConfigError, "server_mismatch", values=("SGLang",)):
        engine_at(double, tokenizer, files)
    double.server.shutdown()
    double.server.server_close()
    with raises(RunError, "server_unreachable", values=("server_info", 2)):
        engine_at(double, tokenizer, files, retries=1)


def test_distributions_whose_logprobs_it_does_not_tell_are_refused_by_check(double, tokenizer, tmp_path):
    engine = SGLangConfig(url="http://localhost:30000")
    with raises(ConfigError, "not_supported", keys=("top_p",), values=(0.9,), fix="rollout.top_p=1.0"):
        RolloutConfig(engine=engine, top_p=0.9)
    assert RolloutConfig(engine=engine, top_k=8).engine is engine
    with raises(ConfigError, "out_of_range", keys=("rollout.top_k",), values=(65, 64)):
        engine_at(double, tokenizer, FileTransfer(tmp_path)).generate([[7]], SamplingParams(4, top_k=65))
    with raises(ConfigError, "unsupported_combination", keys=("engine.transport", "placement")):
        RolloutConfig(engine=SGLangConfig(url="http://localhost:30000", transport="broadcast"), placement="colocated")
    with raises(ConfigError, "not_supported", keys=("model",), values=("x",)):
        SGLangConfig(url="http://localhost:30000", model="x")


def test_a_pool_goes_on_without_the_server_that_died_and_gives_weights_to_all(doubles, tokenizer, tmp_path):
    """The pool is the one of vLLM's servers (test_server_pool.py has the rest)."""
    files = FileTransfer(tmp_path)
    pool = LivePool([engine_at(double, tokenizer, files, retries=0) for double in doubles], files, concurrency=8)
    trained = build_model(tokenizer)
    tiny.perturb(trained, 5)
    named = [(name, p.detach()) for name, p in trained.named_parameters()]
    pool.update_weights([named])

    def dies(body):
        raise ConnectionResetError

    doubles[1].hooks = dict.fromkeys(("/generate", "/health", "/model_info"), dies)
    prompts, seeds, params = [[7, 8, 9], [30, 31], [40]], [1, 2, 3], SamplingParams(6)
    found = pool.generate(prompts, params, seeds)
    oracle = HFEngine(trained, stop_token_ids=[tokenizer.eos_token_id], pad_token_id=0)
    assert [c.tokens for c in found] == [c.tokens for c in oracle.generate(prompts, params, seeds)]
    assert pool.metrics == {"live_servers": 1} and {c.weight_version for c in found} == {1}
    doubles[1].hooks = {}
    pool.update_weights([named])
    assert pool.metrics == {"live_servers": 2}


def test_on_shared_gpus_memory_is_freed_and_taken_back_in_order(double, tokenizer, tmp_path):
    engine = engine_at(double, tokenizer, FileTransfer(tmp_path))
    shared, named = SharedGPUs(engine, [engine]), [list(build_model(tokenizer).named_parameters())]
    shared.rest(weights_follow=False)
    assert double.asleep == {"kv_cache"}, "its weights would be lost"
    shared.generate([[7]], GREEDY)
    shared.rest(weights_follow=True)
    assert double.asleep == {"kv_cache", "weights"}
    double.calls.clear()
    shared.update_weights(named)
    shared.generate([[7]], GREEDY)
    woken = [(path, body["tags"]) for path, body in double.calls if path == "/resume_memory_occupation"]
    assert [tags for _, tags in woken] == [["weights"], ["kv_cache"]]
    told = [path for path, _ in double.calls]
    assert told.index("/update_weights_from_disk") > told.index("/resume_memory_occupation")
