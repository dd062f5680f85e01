"""AutoPipeline's interface: every option acts or is refused by name, and every member says what it documents."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import LlamaForCausalLM, LlamaModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.models.builder import build_part
from automodel_cli.models.config import ModelConfig
from automodel_cli.pipelining.auto_pipeline import AutoPipeline
from automodel_cli.pipelining.config import PipelineConfig
from tests.dist.harness import launch, launch_all
from tests.dist.pipeline_cases import Case, loss_over, make_batches, whole_part
from tests.errors import assert_error, raises
from tests.rounding import tolerance
from tests.tiny import build_hf, gradient_error, gradients, tiny_fields

pytestmark = pytest.mark.slow

PART = Case("1F1B")


class ReadyModel(LlamaModel):
    """Takes ids or hidden states, and returns hidden states."""

    def forward(
        self, input_ids: Any = None, position_ids: Any = None, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        hidden_BTD = input_ids if self.embed_tokens is None else self.embed_tokens(input_ids)
        if position_ids is None:
            position_ids = torch.arange(hidden_BTD.shape[1])[None]
        mask = create_causal_mask(self.config, hidden_BTD, None, None, position_ids)  # the 4th is the cache
        positions = self.rotary_emb(hidden_BTD, position_ids)
        for layer in self.layers.values() if isinstance(self.layers, nn.ModuleDict) else self.layers:
            hidden_BTD = layer(hidden_BTD, attention_mask=mask, position_embeddings=positions, **kwargs)
        return BaseModelOutputWithPast(hidden_BTD if self.norm is None else self.norm(hidden_BTD))


class ReadyOuter(LlamaForCausalLM):
    """Returns logits, or hidden states where it has no head."""

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
        hidden_BTD = self.model(input_ids=input_ids, **kwargs)[0]
        return hidden_BTD if self.lm_head is None else self.lm_head(hidden_BTD)


class ReadyInner(LlamaForCausalLM):
    def __init__(self, config: Any):
        super().__init__(config)
        self.model = ReadyModel(config)


class ReadyBoth(ReadyOuter, ReadyInner):
    pass


READY: dict[str, tuple[Any, dict[str, Any]]] = {
    "inner": (ReadyInner, {"patch_inner_model": False}),
    "outer": (ReadyOuter, {"patch_causal_lm_model": False}),
    "both": (ReadyBoth, {"patch_inner_model": False, "patch_causal_lm_model": False}),
}

REFUSED_OPTIONS: dict[str, tuple[dict[str, Any], str, tuple[Any, ...]]] = {
    "no mesh": ({"world_mesh": None}, "missing_key", ("world_mesh",)),
    "axis": ({"pp_axis_name": "stage"}, "unknown_name", ("pp_axis_name", "stage", "pp")),
    "dp axis": ({"dp_axis_names": ("data",)}, "unknown_name", ("dp_axis_names", "data")),
    "cp axis": ({"cp_axis_name": "cp"}, "unknown_name", ("cp_axis_name", "cp")),
    "expert axis": ({"ep_axis_name": "ep"}, "unknown_name", ("ep_axis_name", "ep")),
    "no schedule": ({"pp_schedule": None}, "missing_key", ("pp_schedule", "pp_schedule_csv")),
    "schedule": ({"pp_schedule": "1f2b"}, "invalid_choice", ("pp_schedule", "1f2b")),
    "csv": ({"pp_schedule_csv": "/nowhere.csv"}, "missing_file", ("pp_schedule_csv=/nowhere.csv",)),
    "microbatch": ({"pp_microbatch_size": 0}, "out_of_range", ("pp_microbatch_size=0", 1)),
    "divide": (
        {"pp_microbatch_size": 3, "pp_batch_size": 8},
        "not_divisible",
        ("pp_microbatch_size=3", "pp_batch_size=8"),
    ),
    "layers": ({"layers_per_stage": 0}, "out_of_range", ("layers_per_stage=0", 1)),
    "rounding": (
        {"round_virtual_stages_to_pp_multiple": "near"},
        "invalid_choice",
        ("round_virtual_stages_to_pp_multiple", "near"),
    ),
    "two ways": ({"layers_per_stage": 2, "layout": "Ett|ttL"}, "mutually_exclusive", ("layout", "layers_per_stage")),
    "balance": ({"balance": "fair"}, "invalid_choice", ("balance", "fair")),
    "runtime": ({"runtime": "eager"}, "not_supported", ("runtime", "eager")),
    "overlap": ({"overlap_p2p_comm": True}, "not_supported", ("overlap_p2p_comm=True",)),
    "partial": (
        {"num_microbatches_with_partial_activation_checkpoints": 1},
        "not_supported",
        ("num_microbatches_with_partial_activation_checkpoints=1",),
    ),
    "near": ({"pp_schedule": "zb-h3"}, "invalid_choice", ("pp_schedule", "zb-h3")),
    "dtype": ({"dtype": "bf17"}, "invalid_choice", ("dtype", "bf17")),
    "group size": ({"microbatch_group_size": 0}, "out_of_range", ("microbatch_group_size=0",)),
    "length": ({"pp_seq_len": 0}, "out_of_range", ("pp_seq_len=0",)),
}

REFUSED_BUILDS: dict[str, tuple[dict[str, Any], str, tuple[Any, ...]]] = {
    "too few": ({"pp_batch_size": 1}, "out_of_range", ("1 < 2",)),
    "dualpipe": ({"pp_schedule": "dualpipev", "pp_batch_size": 3}, "out_of_range", ("3 < 4",)),
    "group": (
        {"pp_schedule": "interleaved1f1b", "pp_batch_size": 4, "microbatch_group_size": 3},
        "not_divisible",
        ("microbatch_group_size=3", 4),
    ),
    "stages": (
        {"pp_schedule": "interleaved1f1b", "layers_per_stage": 3, "pp_batch_size": 4},
        "stage_count",
        ("pp_size=2", "1 per rank"),
    ),
    "odd": ({"layers_per_stage": 3, "pp_schedule": "looped_bfs"}, "stage_count", ("pp_size=2", "1 per rank")),
    "too many": ({"layers_per_stage": 1, "pp_batch_size": 4}, "stage_count", (4, "pp_size=2", "2 per rank")),
    "layout count": ({"layout": "Ettt|ttL", "pp_batch_size": 4}, "layer-count", ("layout", 5, 4)),
    "layout stages": ({"layout": "Et|t|t|tL", "pp_batch_size": 4}, "stage_count", (2,)),
    "mtp": ({"layout": "Ett|ttmL", "pp_batch_size": 4}, "not_supported_by_model", ("layout", "LlamaForCausalLM")),
    "module": (
        {"module_fqns_per_model_part": [["model.embed_tokens", "model.layer.0"], ["lm_head"]], "pp_batch_size": 4},
        "unknown_name",
        ("model.layer.0", "model.layers.0"),
    ),
}


NOTHING = "nothing was refused"


def _mesh(world: int) -> DeviceMesh:
    return init_device_mesh("cpu", (world,), mesh_dim_names=("pp",))


def _refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except ConfigError as error:
        return error.full_text
    return NOTHING


def refused_options(rank: int, world: int) -> dict[str, tuple[str, str]]:
    """What is refused, and what is still refused when the fix is pasted into the call."""
    mesh = _mesh(world)
    found = {}
    for name, (options, *_) in REFUSED_OPTIONS.items():
        given = {"world_mesh": mesh, **options}
        message = _refusal(lambda given=given: AutoPipeline(**given))
        fix = re.search(r"\n  fix   (.+?)(, or .*|   \(.*)?$", message)
        fixed = {**given, **(eval(f"dict({fix[1].replace(' ', ', ')})") if fix else {})}
        found[name] = message, _refusal(lambda fixed=fixed: AutoPipeline(**fixed)) if fix else NOTHING
    return found


def refused_builds(rank: int, world: int) -> dict[str, str]:
    mesh, part = _mesh(world), whole_part(PART, 4)
    found = {
        name: _refusal(lambda options=options: AutoPipeline(world_mesh=mesh, **options).build(part))
        for name, (options, *_) in REFUSED_BUILDS.items()
    }
    ready = AutoPipeline(world_mesh=mesh, pp_batch_size=2)
    found["model"] = _refusal(lambda: ready.build(nn.Linear(1, 1)))  # type: ignore[arg-type]
    found["loss"] = _refusal(lambda: ready.build(part, loss_fn="sum"))  # type: ignore[arg-type]
    patched = AutoPipeline(mesh, patch_inner_model=False, pp_batch_size=2)
    found["not ready"] = _refusal(lambda: patched.build(part))
    alone, _ = dist.new_subgroups(1)
    wrap = functools.partial(nn.parallel.DistributedDataParallel, process_group=alone)
    found["ddp"] = _refusal(lambda: ready.build(part, parallelize_fn=lambda module, **axes: wrap(module)))
    return found


def refused_sharding(rank: int, world: int) -> str:
    """Zero-bubble with reshard_after_forward=True loses gradients: never built."""
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))

    def shard(part: nn.Module, **axes: Any) -> None:
        fully_shard(part, mesh=mesh["dp"], reshard_after_forward=True)

    pipeline = AutoPipeline(world_mesh=mesh, pp_schedule="zbv", pp_batch_size=4)
    return _refusal(lambda: pipeline.build(whole_part(PART, 4), parallelize_fn=shard))


@pytest.fixture(scope="module")
def option_errors() -> dict[str, tuple[str, str]]:
    return launch(refused_options, 2)


@pytest.fixture(scope="module")
def build_errors() -> dict[str, str]:
    return launch(refused_builds, 2)


@pytest.mark.parametrize("name", REFUSED_OPTIONS)
def test_refused_options_and_fixes_that_work_when_pasted(name: str, option_errors: dict[str, tuple[str, str]]):
    message, still = option_errors[name]
    _, code, values = REFUSED_OPTIONS[name]
    assert_error(message, code, values=values)
    assert still == NOTHING, message


@pytest.mark.parametrize("name", REFUSED_BUILDS)
def test_refused_builds(name: str, build_errors: dict[str, str]):
    _, code, values = REFUSED_BUILDS[name]
    assert_error(build_errors[name], code, values=values)


def test_refused_arguments(build_errors: dict[str, str]):
    assert_error(build_errors["model"], "wrong_type", values=("model", "Linear"))
    assert_error(build_errors["loss"], "wrong_type", values=("loss_fn", "str"))
    assert_error(build_errors["ddp"], "unsupported_combination", values=("DDP",))
    assert_error(build_errors["not ready"], "not_supported_by_model"), "transformers' forward takes no hidden states"


def test_zero_bubble_refuses_resharding():
    assert_error(launch(refused_sharding, 2), "unsupported_combination", values=("reshard_after_forward",))


def before_build(rank: int, world: int) -> list[Any]:
    pipeline = AutoPipeline(world_mesh=_mesh(world))
    errors = []
    for call in (lambda: pipeline.parts, lambda: pipeline.update_seq_len(8), lambda: pipeline.forward_backward([])):
        with pytest.raises(RuntimeError, match="not built yet"):
            call()
        errors.append("refused")
    listed = [pipeline.list_stage_modules(), pipeline.get_stage_param_counts(), pipeline.get_total_param_count()]
    pipeline.info.model_parts = [nn.Sequential(nn.Linear(10, 5), nn.Linear(5, 1, bias=False))]
    pipeline.info.model_parts[0][0].weight.requires_grad_(False)  # type: ignore[union-attr,index]
    counts = [pipeline.get_total_param_count(), pipeline.get_total_param_count(trainable_only=True)]
    fresh = AutoPipeline(world_mesh=_mesh(world))
    return [errors, listed, counts, pipeline.list_stage_modules(), fresh.debug_summary(), fresh.pretty_print_stages()]


def test_members_before_build():
    errors, listed, counts, modules, summary, pretty = launch(before_build, 2)
    assert errors == ["refused"] * 3
    assert listed == [[], [], 0]
    assert counts == [60, 10]
    assert modules == [["0", "1"]]
    assert summary.splitlines() == ["Local stages: 0", "Schedule: None"]
    assert pretty == "<no stages>"


def after_build(rank: int, world: int, folder: str) -> dict[str, Any]:
    mesh = build_mesh_of(world)
    whole = build_hf("llama")
    pipeline = AutoPipeline(world_mesh=mesh, pp_schedule="zbv", pp_batch_size=4, pp_seq_len=16)
    resets: list[int] = []
    assert pipeline.build(whole, loss_fn=loss_over(10.0)) is pipeline
    stages = pipeline.info.stages or []
    begin = stages[0].begin
    stages[0].begin = lambda shapes, train: (resets.append(shapes[0][1]), begin(shapes, train))  # type: ignore
    for length in (16, 128, 128, 100, 200, 200):
        pipeline.update_seq_len(length)
    described = list(resets)
    pipeline.visualize_current_schedule(f"{folder}/rank{rank}.svg")
    with pytest.raises(ConfigError, match=r"rank\d.png' must end in .svg"):
        pipeline.visualize_current_schedule(f"{folder}/rank{rank}.png")
    loss = pipeline.forward_backward(make_batches(PART, 4, 0, 0))  # the loss given to build
    return {
        "info": (pipeline.info.enabled, pipeline.info.has_first_stage, pipeline.info.has_last_stage),
        "indices": [stage.stage_index for stage in stages],
        "resets": described,
        "params": pipeline.get_total_param_count(),
        "whole": sum(p.numel() for p in whole.parameters()),
        "names": [name for part in pipeline.parts for name, _ in part.named_parameters()],
        "hub names": sorted(f"model.{name}" for name, _ in whole.named_parameters()),
        "shared": all(
            p.data_ptr() in {q.data_ptr() for q in whole.parameters()} for x in pipeline.parts for p in x.parameters()
        ),
        "text": pipeline.visualize_current_schedule(),
        "pretty": pipeline.pretty_print_stages(max_modules_per_stage=2),
        "summary": pipeline.debug_summary(),
        "loss": loss.item(),
    }


def build_mesh_of(world: int) -> Any:
    from automodel_cli.distributed.mesh_config import MeshConfig

    return build_mesh(MeshConfig(pp_size=world).resolve(world), "cpu")


def test_members_after_build(tmp_path: Path):
    first, second = launch_all(after_build, 2, str(tmp_path))
    assert first["info"] == (True, True, True) and second["info"] == (True, False, False), "V: rank 0 has both ends"
    assert (first["indices"], second["indices"]) == ([0, 3], [1, 2])
    assert first["resets"] == [128, 100, 200]
    assert first["params"] + second["params"] == first["whole"]
    assert sorted(first["names"] + second["names"]) == first["hub names"]
    assert first["shared"] and second["shared"], "no parameter was copied"
    assert "stage 3:" in first["pretty"] and "more modules" in first["pretty"]
    assert "stage 2: layers 2-2; " in second["summary"]
    assert "rank 1" in first["text"] and "idle" in first["text"]
    assert (tmp_path / "rank0.svg").read_text().startswith("<svg")
    assert first["loss"] > 0 and second["loss"] == 0


def from_meta(rank: int, world: int) -> dict[str, Any]:
    part = build_part(ModelConfig(config=tiny_fields("llama")))
    pipeline = AutoPipeline(world_mesh=_mesh(world), pp_schedule="interleaved1f1b", pp_batch_size=2).build(part)
    return {"meta": all(p.is_meta for x in pipeline.parts for p in x.parameters()), "parts": len(pipeline.parts)}


def test_meta_models_stay_on_meta():
    assert launch(from_meta, 2) == {"meta": True, "parts": 2}


def test_config_node():
    with raises(ConfigError, "invalid_choice", keys=("schedule",), values=("gpip",)):
        PipelineConfig(schedule="gpip")
    with raises(ConfigError, "out_of_range", values=("3 < 4",)):
        PipelineConfig(schedule="dualpipev").check(pp_size=2, num_microbatches=3)


ORDER = (
    *("world_mesh", "moe_mesh", "pp_axis_name", "dp_axis_names", "cp_axis_name", "tp_axis_name", "ep_axis_name"),
    *("ep_shard_axis_names", "pp_schedule", "pp_schedule_csv", "pp_microbatch_size", "pp_batch_size"),
    *("layers_per_stage", "round_virtual_stages_to_pp_multiple", "module_fqns_per_model_part", "patch_inner_model"),
    *("patch_causal_lm_model", "patch_stage_backward_maybe_with_nosync", "defer_fsdp_grad_sync", "device", "dtype"),
    "scale_grads_in_schedule",
)
"""Parameters that programs pass by position (NeMo AutoModel's order)."""


def test_arguments_by_position():
    parameters = inspect.signature(AutoPipeline).parameters.values()
    assert tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD) == ORDER


def ready_steps(rank: int, world: int) -> dict[str, tuple[float, float]]:
    """Worst relative error of a gradient, and of the loss, of models that take and return hidden states themselves."""
    mesh, batches, found = _mesh(world), make_batches(PART, 4, 0, 0), {}
    whole = whole_part(PART, 4)
    loss = loss_over(50.0)
    value = sum(loss(whole(labels=b.labels_BT, **b.model_inputs()), b) for b in batches)
    value.backward()
    want = {f"model.{name}": grad for name, grad in gradients(whole.model).items()}
    for name, (model_class, options) in READY.items():
        model = model_class(whole.model.config)
        model.load_state_dict(whole.model.state_dict())
        model.set_attn_implementation("packed")
        pipeline = AutoPipeline(mesh, None, "pp", pp_batch_size=4, **options).build(model)
        got = pipeline.forward_backward(batches, loss)
        everywhere: list[Any] = [None] * world
        dist.all_gather_object(everywhere, ({n: g for p in pipeline.parts for n, g in gradients(p).items()}, got))
        merged = {n: g for of_rank, _ in everywhere for n, g in of_rank.items()}
        loss_error = abs(sum(of_rank.item() for _, of_rank in everywhere) - value.item()) / value.item()
        assert pipeline.pp_mesh.get_group() == mesh.get_group() and pipeline.device.type == "cpu"
        found[name] = gradient_error(want, merged), loss_error
    return found


def test_models_whose_own_forward_takes_hidden_states():
    for name, errors in launch(ready_steps, 2).items():
        assert max(errors) < tolerance(), (name, errors)


def scaled_steps(rank: int, world: int) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients of two steps on the same weights, of 4 and of 2 microbatches, without scaling and with it."""
    found = []
    for scales in (False, True):
        pipeline = AutoPipeline(_mesh(world), pp_batch_size=4, scale_grads_in_schedule=scales).build(
            whole_part(PART, 4)
        )
        total = sum(
            pipeline.forward_backward(make_batches(PART, count, step, 0), loss_over(10.0)).item()
            for step, count in enumerate((4, 2))
        )
        found.append((total, {n: g.clone() for p in pipeline.parts for n, g in gradients(p).items()}))
    return found


def test_scaled_gradients_are_those_of_the_mean_over_microbatches():
    """Of each step by itself: 4 and 2 microbatches, whose gradients add up."""
    whole, loss = whole_part(PART, 4), loss_over(10.0)
    for step, count in enumerate((4, 2)):
        for batch in make_batches(PART, count, step, 0):
            (loss(whole(labels=batch.labels_BT, **batch.model_inputs()), batch) / count).backward()
    want = gradients(whole)
    per_rank = launch_all(scaled_steps, 2)
    assert sum(rank[1][0] for rank in per_rank) == pytest.approx(sum(rank[0][0] for rank in per_rank), rel=1e-6)
    got = {name: grad for rank in per_rank for name, grad in rank[1][1].items()}
    assert got.keys() == want.keys() and gradient_error(want, got) < tolerance()
