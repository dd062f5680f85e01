"""Megatron-core's schedule functions against rows observed from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from automodel_cli.pipelining.megatron_core import arithmetic as mc
from automodel_cli.pipelining.megatron_core import tensors as mt
from automodel_cli.pipelining.megatron_core.config import ModelParallelConfig
from automodel_cli.pipelining.megatron_core.grad_sync import plan_sync
from automodel_cli.pipelining.schedule import one_f_one_b

VECTORS = json.loads((Path(__file__).parents[3] / "vectors" / "schedules_pp2_pp4.json").read_text())


class Group:
    def __init__(self, size, rank):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


class Communicator:
    def __init__(self, size, rank, virtual):
        self.pp_group, self.virtual_pipeline_model_parallel_size = Group(size, rank), virtual


def test_pp_rank_microbatches():
    for row in VECTORS["pp_rank_microbatches"]:
        want = tuple(row[k] for k in ("total", "all_in_warmup", "warmup", "remaining"))
        arguments = (row["microbatches"], row["chunks"], row["group"], row["forward_only"], row["overlap_moe"])
        assert (
            one_f_one_b.get_pp_rank_microbatches(*arguments, Communicator(row["pp"], row["rank"], row["vp"])) == want
        ), row
        numbers = {
            "pipeline_parallel_size": row["pp"],
            "pipeline_parallel_rank": row["rank"],
            "virtual_pipeline_parallel_size": row["vp"],
        }
        assert one_f_one_b.get_pp_rank_microbatches(*arguments, **numbers) == want, row


def test_schedule_table():
    for row in VECTORS["schedule_table"]:
        table = one_f_one_b.get_schedule_table(row["microbatches"], row["chunks"], row["group"])
        assert table == list(zip(row["microbatch_id"], row["chunk_id"], strict=True)), row


def test_schedule_order():
    for row in VECTORS["schedule_order"]:
        table = one_f_one_b.get_schedule_table(row["microbatches"], row["chunks"], row["group"])
        order = mc.convert_schedule_table_to_order(row["warmup"], row["chunks"], table)
        assert order == row["order"], row
        assert len(order) == 2 * row["microbatches"] * row["chunks"] and sum(order) == 0


def test_layer_order_under_overlap():
    for row in VECTORS["overlap_layer_order"]:
        got = mc.get_overlap_moe_expert_parallel_comm_order(row["order"], row["layers_per_chunk"], row["wgrad_split"])
        assert got.layers == row["layer_order"], row
        assert [None if x is None else list(x) for x in got.chunk_layer] == row["chunk_layer"], row


def test_tensor_shapes():
    for row in VECTORS["tensor_shapes"]:
        arguments = {
            k: row[k]
            for k in (
                "seq_length",
                "micro_batch_size",
                "decoder_seq_length",
                "sequence_parallel",
                "variable_seq_lengths",
            )
        }
        arguments |= {
            "hidden_size": row["hidden"],
            "tensor_parallel_size": row["tp"],
            "context_parallel_size": row["cp"],
        }
        if row["indivisible"]:
            with pytest.raises(ValueError, match="do not divide"):
                mc.get_tensor_shapes(**arguments)
        else:
            assert [list(shape) for shape in mc.get_tensor_shapes(**arguments)] == row["shapes"], row


def test_flags_and_dispatch():
    for row in VECTORS["first_val_step"]:
        assert mc.check_first_val_step(row["first_val_step"], row["forward_only"], row["cond"]) is row["out"], row
    for row in VECTORS["is_single_shape"]:
        assert mt.is_single_shape(eval(row["input"])) is row["out"], row
    for row in VECTORS["forward_backward_func"]:
        assert mc.forward_backward_func_name(row["pp"], row["vp"]) == row["func"], row
    assert mc.forward_backward_func_name(1, 4) == "forward_backward_no_pipelining"


def test_traces():
    for row in VECTORS["traces"]:
        arguments = (row["microbatches"], row["pp"], row["rank"], row["vp"], row["group"])
        if "error" in row:
            with pytest.raises((ValueError, RuntimeError), match=row["rule"]) as error:
                one_f_one_b.compute_order(*arguments)
            assert type(error.value).__name__ == row["error"]
        else:
            assert [str(step) for step in one_f_one_b.compute_order(*arguments)] == row["compute"], row


def test_full_traces_compute_and_recompute():
    """The compute entries of the recorded runs, with the flag of partial activation checkpointing."""
    for row in VECTORS["traces_full"]:
        if "error" in row:
            continue
        options, warmup = row["options"], None
        order = one_f_one_b.compute_order(
            row["microbatches"],
            row["pp"],
            row["rank"],
            row["vp"],
            row["group"],
            forward_only=options.get("forward_only", False),
        )
        warmup = next((k for k, step in enumerate(order) if step.kind == "B"), len(order)) - 1
        got, forwards = [], 0
        for step in order:
            mark = ""
            if step.kind == "F":
                recompute = mc.checkpoint_activations_microbatch(forwards, warmup, options.get("ckpt_microbatches"))
                mark = {None: "", True: "!", False: "-"}[recompute]
                forwards += 1
            got.append(f"{step}{mark}")
        want = [event.rstrip("*") for event in row["events"] if event[0] in "FB"]
        assert got == want, row


def test_sync_plan_is_the_recorded_one():
    """Parameter and gradient collectives of the recorded interleaved runs, at their place among the compute entries."""
    seen = 0
    for row in VECTORS["traces_full"]:
        options = row["options"]
        if "error" in row or row["vp"] is None or options.get("forward_only"):
            continue
        kinds = ["F", "B", *(f"{kind}_sync" for kind in ("param", "grad") if options.get(f"{kind}_sync"))]
        if not options.get("grad_sync"):
            kinds.append("no_sync-")
        want = [e.rstrip("*!-") if e[0] in "FB" else e for e in row["events"] if e.startswith(tuple(kinds))]
        if not options.get("grad_sync"):
            want.pop()  # the context is left once more at the end of the step
        assert [e for e in _sync_events(row) if e.startswith(tuple(kinds))] == want, row
        seen += 1
    assert seen == 18


def _sync_events(row):
    """Compute entries of one rank with the collectives of its plan between them."""
    table = one_f_one_b.get_schedule_table(row["microbatches"], row["vp"], row["group"])
    plan = plan_sync(table, row["vp"], row["rank"], grad_sync_func=row["options"].get("grad_sync", False))
    yield from (f"param_sync{chunk}" for chunk in plan.params_at_start)
    forwards = backwards = 0
    for step in one_f_one_b.compute_order(row["microbatches"], row["pp"], row["rank"], row["vp"], row["group"]):
        if step.kind == "F":
            if forwards in plan.params_before_forward:
                yield f"param_sync{plan.params_before_forward[forwards]}"
            forwards += 1
        elif backwards in plan.grads_in_backward:
            yield "no_sync-"
        yield str(step)
        if step.kind == "B":
            if backwards in plan.grads_after_backward:
                yield f"grad_sync{plan.grads_after_backward[backwards]}"
            backwards += 1
    yield from (f"grad_sync{chunk}" for chunk in plan.grads_at_end)


@pytest.mark.parametrize(
    "row", VECTORS["loss_normalisation"], ids=lambda r: f"{r['kind']}-{r['per_token']}-cp{r['cp']}-{r['num_tokens']}"
)
def test_loss_normalisation(row):
    tokens = torch.tensor(row["num_tokens"])
    functions = {
        "2tuple": lambda out: (out, {"lm loss": float(out)}),
        "3tuple": lambda out: (out, tokens, {"lm loss": float(out)}),
        "4tuple": lambda out: (out, tokens, {}, {}),
        "none_loss_func": None,
        "collect_non_loss_data": lambda out, non_loss_data: {"anything": float(out)},
    }

    def run():
        return mt.forward_step_calc_loss(
            torch.tensor(row["loss_in"]),
            functions[row["kind"]],
            num_microbatches=row["microbatches"],
            is_last_stage=row["last_stage"],
            context_parallel_size=row["cp"],
            calculate_per_token_loss=row["per_token"],
            collect_non_loss_data=row["kind"] == "collect_non_loss_data",
        )

    if "error" in row:
        with pytest.raises(AssertionError):
            run()
        return
    got = run()
    assert float(got.output) == pytest.approx(row["loss_out"], abs=5e-5)
    assert int(got.num_tokens) == row["num_tokens_out"]
    assert [float(x) if isinstance(x, torch.Tensor) else x for x in got.stored] == row["stored"]


def test_aux_loss_scales():
    for row in VECTORS["aux_loss_scale"]:
        scale = row["grad_scale"]
        moe, mtp = mt.aux_loss_scales(
            num_microbatches=row["microbatches"],
            context_parallel_size=row["cp"],
            calculate_per_token_loss=row["per_token"],
            grad_scale_func=None if scale is None else lambda x, scale=scale: x * scale,
        )
        assert (float(moe), float(mtp)) == pytest.approx((row["moe_aux_scale"], row["mtp_scale"])), row
    with pytest.raises(ValueError, match="one element, not 2"):
        mt.aux_loss_scales(num_microbatches=1, grad_scale_func=lambda x: torch.ones(2))


def test_deallocated_backward_equals_autograd():
    torch.manual_seed(0)
    x, weight, grad = torch.randn(5, 7), torch.randn(7, 3), torch.randn(5, 3)
    runs = []
    for release in (False, True):
        w = weight.clone().requires_grad_()
        inputs = x.clone().requires_grad_()
        out = (inputs @ w).tanh() * 2
        mt.deallocate_output_tensor(out, release)
        assert out.numel() == (1 if release else 15) and out.grad_fn is not None
        config = ModelParallelConfig(hidden_size=3, deallocate_pipeline_outputs=release)
        got = mt.backward_step(inputs, out, grad, None, config)
        runs.append((got, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_deallocate_refusals():
    w = torch.randn(4, 4, requires_grad=True)
    out = w * 2
    with pytest.raises(AssertionError, match="view"):
        mt.deallocate_output_tensor(out[1:], True)
    with pytest.raises(AssertionError, match="expected a tensor"):
        mt.deallocate_output_tensor("x", True)
    with pytest.raises(AssertionError, match="16 elements"):
        mt.custom_backward(out, torch.ones(4, 4))
    mt.deallocate_output_tensor(None, True)
    nested = {"a": [w * 1], "b": w * 3}
    mt.deallocate_output_tensor(nested, True)
    assert nested["a"][0].numel() == nested["b"].numel() == 1
    mt.deallocate_output_tensor(out, True)
    with pytest.raises(RuntimeError):
        torch.autograd.backward(out, torch.ones(4, 4))


def test_backward_step_forms():
    w = torch.ones(3, requires_grad=True)
    plain, scaled = ModelParallelConfig(3), ModelParallelConfig(3, grad_scale_func=lambda loss: loss * 4)
    assert mt.backward_step(None, (w * 2).sum(), None, None, scaled) is None
    assert torch.equal(w.grad, torch.full((3,), 8.0))
    a = torch.ones(2, requires_grad=True)
    assert torch.equal(mt.backward_step([a], [a * 5], [torch.ones(2)], None, plain)[0], torch.full((2,), 5.0))
    assert mt.backward_step(None, torch.ones(3), None, None, plain) is None
