"""`automodel plan` against the modules themselves, closed forms, and a real forward pass."""

from __future__ import annotations

import functools
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.config import CPUOffload, DDPConfig, FSDP2Config, MixedPrecision
from automodel_cli.distributed.mesh_config import Layout
from automodel_cli.models.builder import build_part
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.mtp_config import MTPConfig
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.pipelining.cut.cut_stage import cut_stage
from automodel_cli.pipelining.cut.split_check import check_split
from automodel_cli.pipelining.schedule.schedules import SCHEDULES
from automodel_cli.planning.activation_memory import trace_activations
from automodel_cli.planning.memory import sharded_rows, state_rule
from automodel_cli.planning.plan import make_plan
from automodel_cli.planning.report import render_plan, svg
from automodel_cli.planning.request import PlanRequest
from automodel_cli.training.optimizers.build import build_optimizer
from automodel_cli.training.optimizers.nodes import AdamW, Muon
from automodel_cli.training.optimizers.param_groups import TrainableParam
from tests.e2e.command import automodel, write_config
from tests.errors import assert_error
from tests.tiny import VOCAB, tiny_fields, token_row

ROWS, SEQ_LEN, HIDDEN = 2, 24, 64
FLOAT32 = MixedPrecision(param_dtype="float32")


def request(family: str = "llama", *, tied: bool = False, **changes: Any) -> PlanRequest:
    model = ModelConfig(config=tiny_fields(family, tie_word_embeddings=tied))
    fields: dict[str, Any] = {
        "model": model,
        "layout": Layout(pp=2),
        "parallelizer": FSDP2Config(mp_policy=FLOAT32),
        "optimizer": AdamW(lr=1e-3),
        "pipeline": PipelineConfig(),
        "rows": ROWS,
        "num_microbatches": 8,
        "seq_len": SEQ_LEN,
    }
    return PlanRequest(**fields | changes)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_stage_parameters_are_those_of_the_cut_stages(family: str, tied: bool) -> None:
    asked = request(family, tied=tied, pipeline=PipelineConfig(schedule="interleaved_1f1b"))
    plan = make_plan(asked)
    part = build_part(asked.model)
    whole = sum(p.numel() for p in part.parameters())
    assert plan.num_parameters == whole
    anatomy = check_split(part.model)
    for row in plan.stages:
        stage = cut_stage(part, anatomy, layers=row.layers, is_first=row.is_first, is_last=row.is_last)
        assert row.num_parameters == sum(p.numel() for p in stage.parameters())
    table = VOCAB * HIDDEN if tied else 0  # on the first stage and on the last
    assert sum(row.num_parameters for row in plan.stages) == whole + table


@pytest.mark.parametrize("layout", ["Ett|tt|m|L", "Et|t|tt|mL", None])
@pytest.mark.parametrize("tied", [False, True])
def test_stages_hold_the_layers_for_multi_token_prediction_and_what_they_embed_with(layout: str | None, tied: bool):
    model = ModelConfig(config=tiny_fields("deepseek_v3", tie_word_embeddings=tied), mtp=MTPConfig())
    pipeline = PipelineConfig(schedule="1f1b", layout=layout)
    plan = make_plan(request(model=model, pipeline=pipeline, layout=Layout(pp=4 if layout else 2)))
    part = build_part(model)
    assert plan.num_parameters == sum(p.numel() for p in part.parameters())
    anatomy = check_split(part.model)
    place = next(row.index for row in plan.stages if row.num_depths)
    assert place == (2 if layout == "Ett|tt|m|L" else len(plan.stages) - 1)
    for row in plan.stages:
        ends = {"is_first": row.is_first, "is_last": row.is_last}
        depths = {"holds_depths": row.index == place, "follows_depths": row.index > place}
        stage = cut_stage(part, anatomy, layers=row.layers, **ends, **depths)
        assert row.num_parameters == sum(p.numel() for p in stage.parameters()), row
    assert "1 MTP layer" in render_plan(plan, memory_gib=80)


def test_memory_of_ddp_is_whole_copies_of_everything() -> None:
    ddp = make_plan(request(layout=Layout(dp_shard=4), pipeline=None, parallelizer=DDPConfig()))
    (memory,), stored = ddp.memory, 4 * ddp.num_parameters
    assert (memory.parameters, memory.gradients, memory.optimizer) == (stored, 2 * stored, 2 * stored)
    views = DDPConfig(gradient_as_bucket_view=True)
    in_buckets = make_plan(request(layout=Layout(dp_shard=4), pipeline=None, parallelizer=views))
    assert in_buckets.memory[0].gradients == stored


def test_memory_of_fsdp2_without_a_pipeline() -> None:
    """Shards in float32, the root and three layers gathered in bfloat16, gradients whole in float32 until the last
    microbatch."""
    asked = request(layout=Layout(dp_shard=4), pipeline=None, parallelizer=FSDP2Config())
    plan, part = make_plan(asked), build_part(asked.model)
    (memory,), count = plan.memory, plan.num_parameters
    layer = sum(p.numel() for p in part.model.model.layers[0].parameters())
    root = count - 4 * layer
    assert memory.parameters == count / 4 * 4 + 2 * (root + 3 * layer)
    assert memory.gradients == 4 * count
    assert memory.optimizer == 2 * count / 4 * 4
    assert make_plan(replace(asked, num_microbatches=1)).memory[0].gradients == count  # shards alone
    assert plan.heaviest == memory.parameters + memory.gradients + memory.optimizer + memory.activations + memory.head


def test_memory_of_fsdp2_under_a_pipeline_keeps_the_stage_gathered() -> None:
    plan = make_plan(request(layout=Layout(pp=2, dp_shard=4), parallelizer=FSDP2Config()))
    for row, memory in zip(plan.stages, plan.memory, strict=True):
        count = row.num_parameters
        assert (memory.parameters, memory.gradients, memory.optimizer) == (count + 2 * count, 4 * count, 2 * count)


def test_offloaded_shards_are_in_host_memory() -> None:
    asked = request(layout=Layout(pp=2, dp_shard=4), parallelizer=FSDP2Config(offload_policy=CPUOffload()))
    plan = make_plan(asked)
    for row, memory in zip(plan.stages, plan.memory, strict=True):
        assert memory.optimizer == 0 and memory.parameters == 2 * row.num_parameters
        assert memory.host == (1 + 1 + 2) * row.num_parameters
    assert "in host memory" in render_plan(plan, memory_gib=1)


def test_frozen_parameters_need_neither_gradients_nor_states() -> None:
    asked = request(layout=Layout(), pipeline=None, parallelizer=DDPConfig(gradient_as_bucket_view=True))
    plan = make_plan(replace(asked, model=replace(asked.model, lora=LoRAConfig(rank=4))))
    assert 0 < plan.num_trained < plan.num_parameters / 10
    assert plan.memory[0].gradients == 4 * plan.num_trained
    assert plan.memory[0].optimizer == 8 * plan.num_trained
    assert f"{plan.num_trained:,} trained" in render_plan(plan, memory_gib=1)


class Own:
    """A user's node: it can build, and says nothing of its states."""

    def build(self, parts: Sequence[nn.Module]) -> torch.optim.Optimizer:
        return torch.optim.RMSprop([p for part in parts for p in part.parameters()], momentum=0.5, centered=True)


@pytest.mark.parametrize("layout", [Layout(dp_shard=2), Layout(pp=2, dp_shard=2)], ids=str)
def test_a_frozen_model_is_counted_where_its_shards_are(layout: Layout) -> None:
    """Another model than the trained one, of half its layers, in another dtype, cut and sharded like it."""
    frozen = ModelConfig(config=tiny_fields("llama", num_hidden_layers=2), dtype="bfloat16")
    pipeline = PipelineConfig() if layout.pp > 1 else None
    asked = request(layout=layout, pipeline=pipeline)
    before, plan, offloaded = (
        make_plan(replace(asked, **changes))
        for changes in (
            {},
            {"frozen": frozen},
            {"frozen": frozen, "parallelizer": FSDP2Config(mp_policy=FLOAT32, offload_policy=CPUOffload())},
        )
    )
    whole = sum(p.numel() for p in build_part(frozen).parameters())
    assert sum(memory.frozen for memory in plan.memory) == 2 * whole / 2
    for old, new in zip(before.memory, plan.memory, strict=True):
        assert new.total == old.total + new.frozen and new.frozen > 0
    assert "\nfrozen " in render_plan(plan, memory_gib=80) and "\nfrozen " not in render_plan(before, memory_gib=80)
    assert not any(memory.frozen for memory in offloaded.memory)


@pytest.mark.parametrize(
    "node",
    [
        Own(),
        AdamW(lr=1e-3),
        Muon(lr=1e-3),
        functools.partial(torch.optim.SGD, lr=0.1),
        functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        functools.partial(torch.optim.Adam, lr=0.1, amsgrad=True),
    ],
)
def test_optimizer_states_are_what_a_step_leaves(node: Any) -> None:
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    model(torch.arange(4)).sum().backward()
    optimizer = build_optimizer(node, [model])
    optimizer.step()
    for name, param in model.named_parameters():
        item = TrainableParam(name, param, model.get_submodule(name.rpartition(".")[0]))
        tensors = [t for t in optimizer.state[param].values() if isinstance(t, Tensor) and t.ndim]
        assert state_rule(node)(item, param.numel()) == sum(t.nbytes for t in tensors)


def test_the_first_rank_has_the_largest_chunk() -> None:
    """As FSDP2 does: torch.chunk along the first dim."""
    for rows, shards in ((10, 4), (3, 4), (8, 4)):
        param = nn.Parameter(torch.zeros(rows, 8))
        assert sharded_rows(rows, shards) == len(param.chunk(shards)[0])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "granite"])
def test_traced_activations_are_what_a_real_forward_keeps(family: str) -> None:
    """With the library's eager attention both count the same operators; the trace allocates nothing."""
    config = ModelConfig(config=tiny_fields(family), attn_implementation="eager")
    traced = trace_activations(build_part(config), torch.float32, False, rows=1, seq_len=SEQ_LEN)
    model = build_part(config, device="cpu").model
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model.base_model(input_ids=token_row(SEQ_LEN)[None], use_cache=False)
    real = sum(t.untyped_storage().nbytes() for t in kept.values())
    assert traced.before + sum(traced.layers) + traced.after - traced.boundary == pytest.approx(real, rel=0.02)


def test_checkpointing_keeps_the_inputs_of_layers() -> None:
    part = build_part(ModelConfig(config=tiny_fields("llama")))
    trace = functools.partial(trace_activations, part, torch.bfloat16, rows=ROWS, seq_len=SEQ_LEN)
    none, full, selective, second = (trace(mode) for mode in (False, "full", "selective", 2))
    hidden = 2 * ROWS * SEQ_LEN * HIDDEN
    assert full.layers == (hidden,) * 4 and full.boundary == hidden
    assert full.recomputed == max(none.layers)
    assert all(hidden < kept < whole for kept, whole in zip(selective.layers, none.layers, strict=True))
    assert second.layers == (hidden, none.layers[1], hidden, none.layers[3])
    # queries, outputs and their projection, keys and values (half as wide here), gate, up and down
    products = HIDDEN * (1 + 0.5 + 0.5 + 1 + 1) + 96 * 2 + HIDDEN
    assert selective.layers[0] - hidden == 2 * ROWS * SEQ_LEN * products


def test_live_activations_follow_the_schedule() -> None:
    one = make_plan(request(pipeline=PipelineConfig(schedule="1f1b")))
    all_of_them = make_plan(request(pipeline=PipelineConfig(schedule="gpipe")))
    first, last = one.stages
    assert one.live == (2, 1) and all_of_them.live == (8, 8)
    assert one.memory[0].activations == 2 * first.activations
    assert all_of_them.memory[0].activations == 8 * first.activations
    assert all_of_them.memory[1].activations - one.memory[1].activations == 7 * last.activations


def test_largest_microbatch_is_the_edge() -> None:
    plan = make_plan(request(layout=Layout(), pipeline=None))
    rows = plan.largest_microbatch(2 * plan.heaviest)
    assert rows > ROWS
    per_row = plan.memory[0].activations / ROWS
    rest = plan.heaviest - plan.memory[0].activations
    assert rest + rows * per_row <= 2 * plan.heaviest < rest + (rows + 1) * per_row
    assert plan.largest_microbatch(rest / 2) == 0


def test_every_schedule_is_compared_and_refusals_say_the_rule() -> None:
    plan = make_plan(request(num_microbatches=3))
    assert {row.schedule.name for row, _ in plan.comparison} == {s.name for s in SCHEDULES}
    times = [row.timeline.makespan for row, _ in plan.comparison if row.timeline]
    assert times == sorted(times) and len(times) < len(SCHEDULES)
    own = next(row for row, _ in plan.comparison if row.schedule.name == "1F1B")
    assert own.timeline is not None and plan.timeline is not None
    assert own.timeline.makespan == plan.timeline.makespan
    text = render_plan(plan, memory_gib=80)
    assert (
        "DualPipeV                        2 refused: DualPipeV needs at least 2 * pp_size microbatches: 3 < 4" in text
    )
    assert "> 1F1B" in text and "estimate, to 8% of a dry run" in text


def test_uneven_costs_are_seen_and_a_better_cut_named() -> None:
    """The head of a small model weighs more than its layers."""
    model = ModelConfig(config=tiny_fields("llama", vocab_size=4000, num_hidden_layers=8))
    plan = make_plan(request(model=model, rows=4096))
    assert plan.timeline is not None and plan.balanced is not None
    assert plan.balanced.makespan < plan.timeline.makespan
    assert "pipeline.balance=cost" in render_plan(plan, memory_gib=80)


def test_what_no_tensor_holds_is_set_aside_before_a_plan_fits() -> None:
    """On a GPU with 5 GiB more than the heaviest one needs, one row more a microbatch has no room; with 4, none has."""
    plan = make_plan(request())
    needed = plan.heaviest / 2**30
    assert "\nfits: " in render_plan(plan, memory_gib=needed + 5) and "so does" not in render_plan(
        plan, memory_gib=needed + 5
    )
    tight = render_plan(plan, memory_gib=needed + 4)
    assert "does not fit: " in tight and "not even one row a microbatch does" in tight
    more = max(memory.activations for memory in plan.memory) / plan.request.rows / 2**30
    assert "so does up to microbatch_size=" in render_plan(plan, memory_gib=needed + 1.01 * more + 5)


def test_layout_table_and_pictures() -> None:
    plan = make_plan(request(pipeline=PipelineConfig(schedule="interleaved_1f1b", layout="Et||ttt|L")))
    text = render_plan(plan, memory_gib=80)
    assert "layout Et||ttt|L" in text and "nothing: passes on" in text
    assert "rank 1" in text and "Interleaved1F1B: idle" in text
    drawing = ElementTree.fromstring(svg(plan))
    boxes = [box for box in drawing.iter() if box.tag.endswith("rect") and len(box)]
    assert len(boxes) == 2 * 8 * 3  # forward and backward of every microbatch on the stages that compute


def test_a_layout_with_layers_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="multi-token-prediction"):
        make_plan(request(pipeline=PipelineConfig(schedule="interleaved_1f1b", layout="Et|t|tt|mL")))


MINUTES = (("checkpoint.export_check_minutes=0",), ())


@pytest.mark.slow
def test_command_prints_a_plan_or_says_what_does_not_fit(tmp_path: Path) -> None:
    write_config(tmp_path)
    pipeline = ("mesh.pp_size=2", "pipeline=1f1b")
    good = automodel(tmp_path, "plan", "-c", "tiny.yaml", "--gpus", "4", "--svg", "plan.svg", *pipeline)
    assert good.returncode == 0, good.stderr
    assert "4 GPUs, fsdp2: pp=2 x dp=2" in good.stdout and "fits" in good.stdout
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")
    of_8b = ("plan", "-c", "llama3_8b_tp2cp2", "--gpus", "8")
    without, large = (automodel(tmp_path, *of_8b, *more).stdout for more in MINUTES)
    assert large and "export check" not in without
    (gib,) = re.findall(r"export check: rank 0 reloads the export into ([\d.]+) GiB", large)
    assert 8.03e9 * 4 / 2**30 < float(gib) < 2 * 8.03e9 * 4 / 2**30  # its parameters, stored in float32
    bad = automodel(tmp_path, "plan", "-c", "tiny.yaml", "--gpus", "3", *pipeline)
    assert bad.returncode == 2 and not bad.stdout
    assert "3 ranks are not divisible by pp_size=2" in bad.stderr and "from  mesh.pp_size (command line)" in bad.stderr
    flat = automodel(tmp_path, "plan", "-c", "tiny.yaml", "--gpus", "1", "--svg", "no.svg")
    assert flat.returncode == 2
    assert_error(flat.stderr, "requires_setting", "--svg", "mesh.pp_size", values=(1,))
    assert not (tmp_path / "no.svg").exists()


@pytest.mark.slow
def test_nodes_that_generate_are_not_planned_as_ranks(tmp_path: Path) -> None:
    """The recipes of four nodes: two of them serve, or all do both in turns."""
    separate = automodel(tmp_path, "plan", "-c", "grpo_qwen3_moe_30b_separate", "--gpus", "32")
    assert separate.returncode == 0, separate.stderr
    assert "2 servers of 8 GPUs, on 16 of 32 GPUs" in separate.stdout
    assert "layout    16 GPUs, fsdp2: dp=16 x ep=8" in separate.stdout and "\nfits: " in separate.stdout
    assert "an update is counted as 512 full rows; a run packs its 512 samples into fewer" in separate.stdout
    few = automodel(tmp_path, "plan", "-c", "grpo_qwen3_moe_30b_separate", "--gpus", "16")
    assert few.returncode == 2 and "none of the 16 GPUs" in few.stderr
    colocated = automodel(tmp_path, "plan", "-c", "grpo_qwen3_moe_30b_colocated", "--gpus", "32")
    assert "layout    32 GPUs, fsdp2: dp=32 x ep=8" in colocated.stdout
    rows = dict(line.split()[:2] for line in colocated.stdout.splitlines() if len(line.split()) == 2)
    parameters, optimizer = float(rows["parameters"]), float(rows["optimizer"])
    said = re.search(r"while it generates, fits: 39.5 GiB of a server .* beside (\d+\.\d) GiB", colocated.stdout)
    assert said is not None and float(said[1]) == pytest.approx(parameters + optimizer, abs=0.1)
