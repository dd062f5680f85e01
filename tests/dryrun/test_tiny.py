"""Dry runs of tiny models: what they count, against closed forms and against what the same step does on real ranks."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.distributed.mesh_config import Layout
from automodel_cli.dryrun import command
from automodel_cli.dryrun.command import distinct_ranks, trace_config
from automodel_cli.dryrun.estimate import Estimate, estimate
from automodel_cli.dryrun.fake_device import fake_cuda
from automodel_cli.dryrun.fake_device.ddp import FakeDDP
from automodel_cli.dryrun.microbatch_count import number_to_run
from automodel_cli.dryrun.rank_result import mean_of_all
from automodel_cli.dryrun.suggestions import try_changes
from automodel_cli.dryrun.synthetic_batches import DocumentLengths, microbatches
from automodel_cli.dryrun.synthetic_pictures import Document
from automodel_cli.dryrun.trace_rank import check_covered
from automodel_cli.dryrun.types import RankResult, TraceRequest
from automodel_cli.dryrun.worker import load
from automodel_cli.pipelining.timeline.simulator import peak_activations
from automodel_cli.planning.hardware import GPUS
from automodel_cli.planning.plan import make_plan
from automodel_cli.planning.reserve import RESERVE_GIB
from automodel_cli.planning.simulated_clock import Clock
from automodel_cli.run.plan_request import plan_request
from tests.dist.harness import RankFailure, launch
from tests.dryrun.traces import ends_of_steps, failed_in_fork, trace_in_fork
from tests.e2e.command import automodel
from tests.errors import assert_error, raises

_LAYERS = 2
_PLAIN = (
    f"model.config.num_hidden_layers={_LAYERS}",
    "mesh.tp_size=1",
    "mesh.cp_size=1",
    "mesh.dp_size=null",
    "parallelizer.sequence_parallel=false",
    "train.global_batch_size=32",
    "parallelizer.mp_policy.param_dtype=bfloat16",
)
"""llama3_8b_tp2cp2_tiny on data-parallel ranks only, with half of its layers."""

MIB = 2**20
_HALF_MOMENTS = ("optimizer.state_dtype=bfloat16",)
_BF16 = ("parallelizer.mp_policy.param_dtype=bfloat16",)


@cache
def traced(conf: str, gpus: int, rank: int, *overrides: str, **options: Any) -> RankResult:
    return trace_in_fork(TraceRequest(conf, overrides, gpus, rank, **options))


def test_parameters_optimizer_states_and_gradients_of_one_gpu_are_those_of_the_closed_form() -> None:
    """llama: D=64, F=192, 2 layers, 4 heads of 16, 2 kv heads, V=354, untied; fp32 parameters and AdamW moments."""
    found = traced("llama3_8b_tp2cp2_tiny", 1, 0, *_PLAIN)
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64
    parameters = _LAYERS * layer + 2 * 354 * 64 + 64
    tensors = _LAYERS * 9 + 3
    for kind, factor in (("parameters", 4), ("optimizer", 8)):
        exact = factor * parameters
        assert exact <= found.peak_by_kind[kind] <= exact + 512 * 3 * tensors, kind


@pytest.mark.slow
def test_moments_in_bfloat16_take_half_the_room_and_one_kernel_a_parameter() -> None:
    whole, half = (traced("llama3_8b_tp2cp2_tiny", 1, 0, *_PLAIN, *more) for more in ((), _HALF_MOMENTS))
    tensors = _LAYERS * 9 + 3
    assert half.peak_by_kind["optimizer"] == pytest.approx(whole.peak_by_kind["optimizer"] / 2, abs=512 * 3 * tensors)
    assert [kernel.count for kernel in half.kernels if kernel.what == "AdamW"] == [tensors]
    others = whole.num_kernels - sum(k.count for k in whole.kernels if "adamw" in k.what)
    assert half.num_kernels - tensors - others <= 4 * tensors, "a step size, a count and a flag beside each"


@pytest.mark.nightly
def test_a_whole_step_has_the_same_work_however_many_of_its_microbatches_were_run() -> None:
    three, five = (traced("llama3_8b_tp2cp2_tiny", 1, 0, *_PLAIN, microbatches=n) for n in (3, 5))
    assert five.num_kernels > 1.5 * three.num_kernels
    assert three.step_flops == pytest.approx(five.step_flops, rel=0.002)
    assert three.step_kernel_seconds == pytest.approx(five.step_kernel_seconds, rel=0.002)


@pytest.mark.slow
def test_a_traced_plan_shows_the_peak_of_the_dry_run_in_place_of_its_estimate(tmp_path: Path) -> None:
    found = traced("llama3_8b_tp2cp2_tiny", 1, 0, *_PLAIN)
    shown = automodel(tmp_path, "plan", "-c", "llama3_8b_tp2cp2_tiny", "--gpus", "1", "--traced", *_PLAIN)
    assert shown.returncode == 0, shown.stderr
    lines = [line.rsplit(maxsplit=1) for line in shown.stdout.splitlines() if line]
    said = {line[0].strip(): line[1] for line in lines if len(line) == 2}
    assert (said["peak"], said["estimate without a dry run"]) == (
        f"{found.peak / MIB:,.2f}",
        f"{found.plan / MIB:,.2f}",
    )
    assert said["optimizer"] == f"{found.peak_by_kind['optimizer'] / MIB:,.2f}"
    assert "set aside, of 79.1 GiB" in shown.stdout


@pytest.mark.slow
def test_a_check_with_gpus_says_that_the_step_fits_or_what_it_would_hold(tmp_path: Path) -> None:
    """A vocabulary of 30 million rows of 64: 3.8 billion numbers, in float32 with two moments and gradients 57 GiB."""
    command = ("check", "-c", "llama3_8b_tp2cp2_tiny", "--gpus", "1", *_PLAIN)
    fits = automodel(tmp_path, *command)
    assert fits.returncode == 0 and fits.stdout.splitlines()[-1].startswith("ok ")
    (line,) = [line for line in fits.stdout.splitlines() if line.startswith("dry run")]
    held = traced("llama3_8b_tp2cp2_tiny", 1, 0, *_PLAIN).peak / 2**30
    assert f"runs, and fits: {held:.1f} GiB of tensors (" in line and f"and {RESERVE_GIB:g} set aside, of 79.1" in line
    refused = automodel(tmp_path, *command, "--resolved")
    assert_error(refused.stderr, "mutually_exclusive", "--resolved", "--gpus")
    unknown = automodel(tmp_path, *command, "--gpu", "tpu")
    assert unknown.returncode == 2 and "'tpu' is not one of" in unknown.stderr  # of click
    alone = automodel(tmp_path, "check", "-c", "llama3_8b_tp2cp2_tiny", "--gpu", "l40s")
    assert alone.returncode == refused.returncode == 2
    assert_error(alone.stderr, "requires_setting", "--gpu", "--gpus", values=("l40s",))
    large = "model.config.vocab_size=30000000"
    found = automodel(tmp_path, *command, large, "--gpu", "l40s")
    assert found.returncode == 2 and "ok " not in found.stdout
    assert (
        re.search(r"ConfigError \[\w+\]: the step of rank 0 does not fit: ", found.stderr)
        and "of 44.5 (NVIDIA L40S)" in found.stderr
    )
    assert "--gpus 1 --rank all-distinct --gpu l40s " in found.stderr and large in found.stderr


def test_a_dense_step_waits_for_the_device_only_in_the_head_and_once_to_refuse_what_is_not_finite() -> None:
    found = traced("llama3_8b_tp2cp2_tiny", 1, 0, *_PLAIN)
    lines = {line.what.split(" at ")[0]: line.count for line in found.syncs}
    assert lines["event.synchronize"] == 1 and ".item()" not in lines
    assert found.num_syncs <= 1 + 2 * found.measured_microbatches


def test_the_host_does_not_wait_for_the_optimizer() -> None:
    """Of 128 million parameters: fused AdamW reads and writes seven numbers of four bytes for each."""
    large = "model.config.vocab_size=1000000"
    host, device = ends_of_steps(TraceRequest("llama3_8b_tp2cp2_tiny", (*_PLAIN, large), 1))[-1]
    optimizer = 7 * 4 * 2 * 64 * 1_000_000 / (GPUS["h100"].bandwidth)
    assert device - host > 0.9 * optimizer


@pytest.mark.parametrize(
    ("objective", "ours"),
    [
        ("WrongShape", False),
        ("WrongName", False),
        ("AsksTheStream", True),
        ("AsksTheDevice", True),
        ("ReadsValues", True),
    ],
)
def test_faults_of_the_dry_run_are_told_from_those_of_the_step(objective: str, ours: bool) -> None:
    target = f"objective={{_target_: tests.dryrun.faulty.{objective}}}"
    failed = failed_in_fork(TraceRequest("llama3_8b_tp2cp2_tiny", (*_PLAIN, target), 1, trust_packages=("tests",)))
    assert failed["ours"] is ours, failed
    assert "faulty.py" in failed["trace"] and "site-packages/torch" not in failed["trace"]


@pytest.mark.parametrize("ours", [False, True])
def test_a_failed_trace_is_an_error_of_its_kind(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message of a fault of ours offers the estimate that needs no step."""
    answer = json.dumps({"failed": {"message": "TypeError: why", "trace": "", "ours": ours}})
    monkeypatch.setattr(command, "_WORKER", [sys.executable, "-c", f"print({answer!r})"])
    with pytest.raises(RunError, match="TypeError: why") as caught:
        command.trace_rank(TraceRequest("quickstart", ("train.max_steps=3",), 2))
    assert isinstance(caught.value, command.DryRunError) is ours and caught.value.exit_code == 1
    fix = "automodel plan -c quickstart --gpus 2 train.max_steps=3"
    assert (caught.value.fix or "").startswith(fix) is ours


def _names_without_stand_in(rank: int, world: int) -> list[str]:
    clock = Clock()
    real = {"Stream": torch.Stream, "Event": torch.Event}
    fake_cuda.pretend(GPUS["h100"], clock, lambda what, until: None)
    known = {"Stream": torch.cuda.Stream(), "Event": torch.cuda.Event()}
    assert not torch.accelerator.current_stream().is_capturing()
    return [f"{k}.{n}" for k in real for n in dir(real[k]) if not n.startswith("_") and not hasattr(known[k], n)]


def test_streams_and_events_answer_what_torch_asks_of_real_ones() -> None:
    """Except for handles of the driver and of other processes."""
    missing = launch(_names_without_stand_in, 1, process_group=False)
    assert {name.partition(".")[2] for name in missing} <= {
        "native_handle", "event_id", "ipc_handle", "from_ipc_handle"
    }  # fmt: skip


@pytest.mark.nightly
def test_sharded_parameters_are_gathered_and_gradients_reduced_with_the_bytes_that_the_shapes_say() -> None:
    found = traced("llama3_8b_tp2cp2_tiny", 4, 0, *_PLAIN)
    reduced = sum(row["bytes"] for row in found.collectives if row["operator"] == "reduce_scatter_base")
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64
    exact = 4 * (_LAYERS * layer + 2 * 354 * 64 + 64)  # fp32, once a step
    assert exact <= reduced <= 1.02 * exact  # shards are padded to equal rows


_UNSHARDED = (*_PLAIN[:4], "train.global_batch_size=32", "parallelizer.activation_checkpointing=false")
_TINY = _LAYERS * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64) + 2 * 354 * 64 + 64
"""Parameters of llama3_8b_tp2cp2_tiny with half of its layers, of 21 tensors."""


def _sent(found: RankResult, operator: str) -> int:
    return sum(row["bytes"] for row in found.collectives if row["operator"] == operator)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_buckets", "copies"),
    [("false", 2), pytest.param("true", 1, marks=pytest.mark.nightly)],
    ids=["copied", "views"],
)
def test_ddp_holds_whole_gradients_twice_unless_they_live_in_the_buckets_and_sums_them_once(
    in_buckets: str, copies: int
) -> None:
    """Three microbatches a step, of which the last is reduced; besides, a few numbers (loss, norm, weight)."""
    given = ("parallelizer=ddp", f"parallelizer.gradient_as_bucket_view={in_buckets}", *_UNSHARDED)
    found = traced("llama3_8b_tp2cp2_tiny", 4, 0, *given)
    assert found.measured_microbatches == 3
    held = sum(found.peak_by_kind.get(kind, 0) for kind in ("gradients", "gradient buckets"))
    assert copies * 4 * _TINY <= held <= copies * 4 * _TINY + 512 * 22
    assert 4 * _TINY <= _sent(found, "allreduce") <= 4 * _TINY + 1024


@pytest.mark.nightly
def test_megatron_fsdp_gathers_each_layer_for_each_pass_and_reduces_each_microbatch() -> None:
    """Shards of four ranks, padded to whole chunks. What is outside of the layers stays gathered for the step."""
    pytest.importorskip("megatron_fsdp")
    given = ("parallelizer=megatron_fsdp", "parallelizer.sequence_parallel=false", *_UNSHARDED)
    found = traced("llama3_8b_tp2cp2_tiny", 4, 0, *given)
    for kind in ("parameters", "gradients"):
        assert _TINY <= found.peak_by_kind[kind] <= 1.02 * _TINY, kind
    outside = 2 * 354 * 64 + 64
    gathered = 4 * (outside + 3 * 2 * (_TINY - outside))  # three microbatches, two passes
    assert gathered <= _sent(found, "allgather_into_tensor_coalesced") <= 1.02 * gathered
    assert 3 * 4 * _TINY <= _sent(found, "reduce_scatter_tensor_coalesced") <= 1.02 * 3 * 4 * _TINY


@pytest.mark.parametrize("limit", [None, 3.0])
def test_gradients_are_put_into_the_buckets_that_torch_would_put_them_into(limit: float | None) -> None:
    sizes = [2000 * n for n in (1, 700, 30, 3000, 2, 900, 500, 2500, 40)]
    module = nn.ParameterList([nn.Parameter(torch.empty(n, device="meta")) for n in sizes])
    settings = {"bucket_cap_mb": limit, "static_graph": False, "gradient_as_bucket_view": True}
    wrapped = FakeDDP(module, clock=Clock(), process_group=None, broadcast_buffers=False, **settings)
    wrapped._make_buckets()
    limits = [1 << 20, 25 << 20] if limit is None else [int(limit * 2**20)] * 2
    arriving = list(reversed(list(module)))
    assignment, _ = dist._compute_bucket_assignment_by_size(arriving, limits)
    assert [b.numel() for b in wrapped.bucket_buffers()] == [sum(len(arriving[i]) for i in one) for one in assignment]


@pytest.mark.nightly
def test_experts_receive_what_balanced_routers_send_and_all_of_it_when_every_token_goes_to_one_rank() -> None:
    balanced = traced("qwen3_moe_30b_ep8_tiny", 8, 0, microbatches=2)
    worst = traced("qwen3_moe_30b_ep8_tiny", 8, 0, microbatches=2, route="worst")

    def exchanged(found: RankResult) -> float:
        return sum(row["bytes"] for row in found.collectives if row["operator"] == "alltoall_base")

    assert exchanged(worst) > 3 * exchanged(balanced)
    assert worst.peak > balanced.peak


@pytest.mark.nightly
def test_recomputation_lowers_what_activations_hold_and_runs_more_kernels() -> None:
    off, selective, full = (
        traced("llama3_8b_tp2cp2_tiny", 1, 0, *_PLAIN, f"parallelizer.activation_checkpointing={mode}")
        for mode in ("false", "selective", "full")
    )
    assert full.peak < selective.peak < off.peak
    assert full.num_kernels > selective.num_kernels > off.num_kernels


@pytest.mark.nightly
def test_a_pipeline_takes_as_long_as_its_slowest_rank_works_and_waits() -> None:
    ranks = [traced("dpo_llama3_8b_pp2_tiny", 8, rank, *_BF16) for rank in distinct_ranks(Layout(pp=2, dp_shard=4))]
    request = TraceRequest("", (), 8)
    found = estimate(ranks, request.device, 8)
    assert found.timeline is not None
    assert all(rank.actions.keys() == {"F", "B"} for rank in ranks)
    work = [
        rank.num_microbatches
        * sum(sum(seconds.values()) for stages in rank.actions.values() for seconds in stages.values())
        for rank in ranks
    ]
    assert max(work) < found.timeline.makespan < sum(work)
    assert set(found.to_json()) == {
        "peak_gib", "peak_by_kind", "plan_gib", "host_syncs_per_microbatch", "kernels_per_microbatch", "collectives",
        "reserved_gib", "step_seconds", "tokens_per_second_per_gpu", "mfu_estimate", "seconds_by_kind", "counted",
        "utilisation_bound", "fits",
    }  # fmt: skip


@pytest.mark.nightly
def test_no_layer_below_the_lowest_trained_one_has_a_backward_in_any_stage() -> None:
    """The second of two stages has layers 2 and 3. Freezing layer 2 saves the gradients of its weights and inputs."""
    layout = ("mesh.pp_size=2", "pipeline=1f1b", "model.config.num_hidden_layers=4", *_PLAIN[1:])
    frozen = ("train.freeze=[embed_tokens,'layers.[01]']", "train.freeze=[embed_tokens,'layers.[0-2]']")
    trained, half = (traced("llama3_8b_tp2cp2_tiny", 2, 1, *layout, one, document=32) for one in frozen)
    layer = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 192
    tokens = half.measured_microbatches * half.tokens_per_microbatch
    assert 1 < (trained.flops - half.flops) / (tokens * 4 * layer) < 1.1  # and attention
    assert half.plan == pytest.approx(half.peak, rel=0.05)


@pytest.mark.nightly
def test_products_of_8_bits_are_counted_at_twice_the_speed_and_keep_what_others_keep() -> None:
    """Four a linear layer: forward and its repetition, gradients of inputs and of the weight. Two casts each."""
    options = (*_PLAIN, *_BF16, "parallelizer.activation_checkpointing=full")
    plain, in_fp8 = (traced("llama3_8b_tp2cp2_tiny", 1, 0, *options, *more) for more in ((), ("model.fp8={}",)))
    counts = {line.what: line.count for line in in_fp8.kernels}
    layers, linear = _LAYERS, 7
    assert counts["_scaled_mm_v2"] == 4 * layers * linear * in_fp8.measured_microbatches
    assert counts["fp8 cast rowwise"] == 8 * layers * linear * in_fp8.measured_microbatches
    # As torch's layers, which are functions of autograd too where they add gradients in their products.
    assert in_fp8.flops == plain.flops and in_fp8.peak <= plain.peak * 1.02
    assert not in_fp8.syncs or len(in_fp8.syncs) == len(plain.syncs)


@pytest.mark.nightly
def test_experts_multiply_in_8_bits_without_waiting_for_sizes() -> None:
    """Six products a layer and microbatch; gradients of weights cast two operands each by expert."""
    options = (*_BF16, "parallelizer.activation_checkpointing=false", "model.fp8={experts: true}")
    found = traced("qwen3_moe_30b_ep8_tiny", 8, 0, *options, microbatches=1)
    counts, layers = {line.what: line.count for line in found.kernels}, 4
    assert counts["_scaled_grouped_mm_v2"] == 6 * layers and "_grouped_mm" not in counts
    assert counts["automodel::fp8_cast_groups"] == 4 * layers
    assert [line.count for line in found.syncs if "find_routes" in line.what] == [layers]
    assert not any("fp8" in line.what for line in found.syncs)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "overrides",
    [
        ("model.lora={rank: 4}", *_PLAIN),
        ("model.lora={rank: 4, use_dora: true}", *_PLAIN),
        ("mesh.pp_size=2", "pipeline=zb_h1", "parallelizer.activation_checkpointing=false", *_PLAIN),
        ("mesh.dp_replicate_size=2", *_PLAIN),
        ("parallelizer.offload_policy={_target_: automodel_cli.distributed.config.CPUOffload}", *_PLAIN),
    ],
    ids=["lora", "dora", "zero bubble", "hybrid sharding", "offload"],
)
def test_the_step_goes_through(overrides: tuple[str, ...]) -> None:
    found = traced("llama3_8b_tp2cp2_tiny", 8, 0, *overrides)
    assert found.peak > 0 and found.num_kernels > 0
    assert found.actions.keys() == ({"F", "I", "W"} if "mesh.pp_size=2" in overrides else set())


@pytest.mark.nightly
@pytest.mark.parametrize("conf", ["dpo_llama3_8b_pp2_tiny", "grpo_moonlight_16b_pp2ep4_tiny"])
def test_preferences_and_updates_of_rollouts_are_steps_too(conf: str) -> None:
    found = traced(conf, 8, 4)
    assert found.num_syncs > 0 and found.peak > 0


@pytest.mark.parametrize(
    ("conf", "override", "key"),
    [
        ("qwen3_moe_30b_ep8_tiny", "parallelizer.expert_dispatch=deepep", "parallelizer.expert_dispatch"),
        ("quickstart", "model.transformer_engine={}", "model.transformer_engine"),
    ],
)
def test_what_fake_tensors_do_not_reach_is_refused_with_what_does(conf: str, override: str, key: str) -> None:
    recipe = load(TraceRequest(conf, (override,), 8))
    with raises(ConfigError, "not_supported", keys=(key,)):
        check_covered(recipe)


def test_layers_compiled_whole_are_refused_where_their_attention_is_a_graph_of_its_own() -> None:
    one_graph = ("parallelizer.enable_compile=true", "parallelizer.activation_checkpointing=selective")
    with pytest.raises(RankFailure, match="float32"):
        traced("llama3_8b_tp2cp2_tiny", 1, 0, *_PLAIN[:-1], "parallelizer.mp_policy.param_dtype=float32", *one_graph)


_PP2 = (*_PLAIN, "mesh.pp_size=2", "model.config.num_hidden_layers=4", "train.microbatch_size=1")


@pytest.mark.parametrize(
    ("schedule", "expected"), [("1f1b", 4), ("interleaved_1f1b", 4), ("zbv", 4), ("gpipe", 48), ("looped_bfs", 48)]
)
def test_as_many_microbatches_are_run_as_show_what_is_alive_at_once(schedule: str, expected: int) -> None:
    """GPipe and LoopedBFS keep all 48 of a step; 2 for each stage are enough for the others."""
    recipe = load(
        TraceRequest("llama3_8b_tp2cp2_tiny", (*_PP2, f"pipeline={schedule}", "train.global_batch_size=48"), 2)
    )
    plan = make_plan(plan_request(recipe, Layout(pp=2)))
    found = number_to_run(recipe, plan, None)
    assert found == expected and plan.cut is not None
    assert peak_activations(plan.cut.program(found)) == plan.live


def test_the_mean_of_an_action_counts_the_first_and_the_last_microbatch_once() -> None:
    spans = [{"gemm": 3.0}, {"gemm": 1.0}, {"gemm": 1.0}, {"gemm": 1.0, "network": 1.0}]
    assert mean_of_all(spans, 10) == pytest.approx({"gemm": 1.2, "network": 0.1})
    assert mean_of_all(spans, 4) == pytest.approx({"gemm": 1.5, "network": 0.25})
    assert mean_of_all(spans[:1], 1) == spans[0]


def test_microbatches_that_the_schedule_cannot_run_are_refused_with_some_that_it_can() -> None:
    recipe = load(TraceRequest("llama3_8b_tp2cp2_tiny", (*_PP2, "pipeline=interleaved_1f1b"), 2))
    plan = make_plan(plan_request(recipe, Layout(pp=2)))
    assert number_to_run(recipe, plan, 6) == 6
    values, fix = ("--microbatches 5", "interleaved_1f1b"), "--microbatches 6"
    with raises(ConfigError, "unsupported_combination", keys=("--microbatches",), values=values, fix=fix):
        number_to_run(recipe, plan, 5)


_TAUGHT = ("teacher.pretrained=Qwen/Qwen3-0.6B", "data.generator.num_train=100")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("conf", "overrides", "tokens"),
    [
        ("quickstart_kd", _TAUGHT, 64),
        pytest.param("quickstart_kd", (*_TAUGHT, "objective.top_k=null"), 354, marks=pytest.mark.nightly),
        pytest.param("quickstart_rm", ("objective.margin=true",), None, marks=pytest.mark.nightly),
    ],
)
def test_objectives_are_given_the_columns_that_they_read(
    conf: str, overrides: tuple[str, ...], tokens: int | None
) -> None:
    found = traced(conf, 1, 0, *overrides, *_BF16)
    assert found.num_kernels > 0
    if tokens is not None:  # a teacher, of 310 tensors
        held = found.peak_by_kind["frozen model"]
        assert 4 * 596_049_920 <= held <= 4 * 596_049_920 + 512 * 312
        assert found.plan == pytest.approx(found.peak, rel=0.02)
        columns = microbatches(load(TraceRequest(conf, overrides, 1)), DocumentLengths((Document(700),), ""), 1)[0]
        assert {name: tuple(one.shape) for name, one in columns.unknown.items()} == {
            "teacher_ids_BTN": (8, 128, tokens),
            "teacher_logprobs_BTN": (8, 128, tokens),
        }


@pytest.mark.slow
def test_mfu_counts_adapters_as_a_run_does() -> None:
    """Rank 4 on all linear layers of the two; a frozen matrix has no gradient."""
    found = traced("llama3_8b_tp2cp2_tiny", 1, 0, "model.lora={rank: 4}", *_PLAIN, document=32)
    matrices = 64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 192
    adapters = _LAYERS * 4 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 192))
    attention = 6 * _LAYERS * (4 * 32) * 32
    assert found.model_flops_per_token == 4 * (_LAYERS * matrices + 64 * 354) + 6 * adapters + attention


def test_mfu_of_a_reward_model_counts_one_value_of_a_token_and_no_vocabulary() -> None:
    """2 layers of D=64, F=192 with 4 heads of 16."""
    found = traced("quickstart_rm", 1, 0, document=32)
    matrices = 4 * 64 * 64 + 3 * 64 * 192
    attention = 6 * 2 * (4 * 32) * 32
    assert found.model_flops_per_token == 6 * (2 * matrices + 64) + attention


@pytest.mark.nightly
def test_what_does_not_fit_is_told_with_changes_that_were_run_and_the_best_comes_first() -> None:
    wide = ("train.microbatch_size=8", "parallelizer.activation_checkpointing=false")
    before = traced("llama3_8b_tp2cp2_tiny", 1, 0, *_PLAIN, *wide)
    small = replace(GPUS["h100"], memory_gib=RESERVE_GIB + before.peak / 2**30 / 2)

    def on_small(request: TraceRequest, ranks: Sequence[int]) -> Estimate:
        return replace(trace_config(replace(request, gpu="h100"), ranks), gpu=small)

    request = TraceRequest("llama3_8b_tp2cp2_tiny", (*_PLAIN, *wide), 1)
    tried = try_changes(load(request), request, 2, lambda layout, heaviest: (heaviest,), on_small, small)
    assert len(tried) == 2
    for one in tried:
        assert one.found is not None
        assert one.found.heaviest.peak < before.peak
        assert one.found.fits == (one.found.heaviest.peak <= before.peak / 2)
    fits = [one.found.fits for one in tried if one.found is not None]
    assert fits == sorted(fits, reverse=True) and fits[0]
    assert set(tried[0].to_json()) == {
        "overrides", "same_training", "peak_gib", "fits", "step_seconds", "tokens_per_second_per_gpu",
    }  # fmt: skip
