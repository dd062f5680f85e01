"""Embedding and head as FSDP2 units of their own: which parts have them, and when they are gathered and reduced."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_cli.distributed.mesh import build_mesh
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.distributed.parallelizer import parallelize
from automodel_cli.models.lm_head.head import HeadKind
from automodel_cli.models.model_part import ModelPart
from automodel_cli.objectives.sft import SFT
from automodel_cli.training.stages import SingleStage
from tests import tiny
from tests.dist.harness import launch
from tests.dist.parity import FSDP2, Case, compare, step_batches, tiny_part


class _Collectives(TorchDispatchMode):
    """Elements of the whole tensor of each all-gather and reduce-scatter, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name == "c10d::_allgather_base_":
            self.seen.append(("gather", args[0].numel()))
        elif name == "c10d::_reduce_scatter_base_":
            self.seen.append(("reduce", args[1].numel()))
        return func(*args, **(kwargs or {}))


def _numel(part: ModelPart, prefix: str) -> int:
    return sum(p.numel() for name, p in part.named_parameters() if name.startswith(prefix))


def _order(rank, world, tied):
    """The collectives of a microbatch, and the elements of tables and layers."""
    part = tiny_part("llama", num_hidden_layers=2, tie_word_embeddings=tied)
    sizes = {name: _numel(part, f"model.{name}.") for name in ("model.embed_tokens", "model.layers.0", "lm_head")}
    mesh = build_mesh(MeshConfig().resolve(world), "cpu")
    stages = SingleStage(parallelize(part, mesh, FSDP2))
    (batch,) = step_batches(Case(num_microbatches=1), world)[rank]
    with _Collectives() as collectives:
        stages.forward_backward([batch], SFT())
    return collectives.seen, sizes


def test_the_head_is_gathered_after_the_layers_and_reduced_before_them():
    seen, sizes = launch(_order, 2, False)
    table, layer, head = sizes["model.embed_tokens"], sizes["model.layers.0"], sizes["lm_head"]
    gathers = [size for what, size in seen if what == "gather"]
    reductions = [size for what, size in seen if what == "reduce"]
    assert gathers[0] < table  # the root has the last norm only
    assert gathers[1:5] == [table, layer, layer, head]
    assert gathers.count(table) + gathers.count(head) == 2 * (1 + (table == head))  # backward gathers neither again
    assert reductions[:3] == [head, layer, layer]
    assert sorted(reductions[3:]) == sorted([gathers[0], table])


def test_a_tied_table_stays_in_the_root_unit():
    seen, sizes = launch(_order, 2, True)
    layer = sizes["model.layers.0"]
    gathers = [size for what, size in seen if what == "gather"]
    assert gathers[0] > sizes["model.embed_tokens"]
    assert gathers[1:3] == [layer, layer]
    assert [size for what, size in seen if what == "reduce"] == [layer, layer, gathers[0]]


@pytest.mark.parametrize("chunks", [1, 3])
def test_prefetch_and_single_microbatch_reductions_keep_the_numbers_of_one_process(chunks):
    config = replace(FSDP2, enable_fsdp2_prefetch=True, defer_fsdp_grad_sync=False)
    (errors,) = launch(compare, 2, [Case(num_microbatches=chunks, config=config, num_layers=2)])
    assert errors.within_rounding(), errors


def test_heads_that_something_else_reads_are_no_units():
    untied = tiny.build_hf("llama", num_hidden_layers=1)
    assert [len(some) for some in ModelPart(untied, HeadKind("plain")).units_around_layers()] == [1, 1]
    assert [len(some) for some in ModelPart(untied, HeadKind("generic")).units_around_layers()] == [1, 0]
    tied = tiny.build_hf("llama", num_hidden_layers=1, tie_word_embeddings=True)
    assert [len(some) for some in ModelPart(tied, HeadKind("plain")).units_around_layers()] == [0, 0]
    untied.lm_head.register_forward_hook(lambda *_: None)
    assert ModelPart(untied, HeadKind("plain")).units_around_layers()[1] == []
    assert not isinstance(untied.lm_head, FSDPModule)
