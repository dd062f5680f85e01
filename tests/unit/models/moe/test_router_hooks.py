"""Replayed experts against the library's own models with their selection forced by hand, family by family."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import IGNORE_INDEX, ROUTED_EXPERTS, Batch
from automodel_cli.distributed.activation_checkpointing.apply import apply_activation_checkpointing
from automodel_cli.distributed.expert_parallel.apply import experts_modules
from automodel_cli.distributed.expert_parallel.router_replay import RouterRecorder, choosing
from automodel_cli.distributed.layer_wrapping import transformer_layers
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.moe.load_balancing import routers
from automodel_cli.models.moe.router_hooks import install_routing, selectors_of
from tests import tiny
from tests.dist.parity import microbatch, tiny_part
from tests.errors import raises

CPU = torch.device("cpu")
NUM_EXPERTS, K = 8, 2


def routed_part(family: str) -> ModelPart:
    part = tiny_part(family)
    install_routing([part], selectors_of(part.source_config), CPU)
    return part


def given_experts(batch: Batch, num_layers: int, seed: int = 7) -> Tensor:
    """Two experts for each token and layer, chosen at random: `[B, T, L * K]`."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(*batch.shape, num_layers, NUM_EXPERTS, generator=generator)
    return scores.topk(K).indices.flatten(2).to(torch.int16)


def loss_and_gradients(part: ModelPart, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    part.zero_grad()
    output = part(**batch.head_inputs(), **batch.model_inputs())
    loss = -output.logprobs_BT[batch.labels_BT != IGNORE_INDEX].double().sum()
    loss.backward()
    return loss.detach(), tiny.gradients(part)


def gates_by_hand(family: str, router: Any, hidden_ND: Tensor, index_NK: Tensor) -> Tensor:
    """The gate weights of the given experts as each family's paper or code has them, without any selection."""
    logits_NE = F.linear(hidden_ND, router.weight, getattr(router, "bias", None))
    if family == "gpt_oss":
        return logits_NE.gather(-1, index_NK).softmax(-1)
    if family == "deepseek_v3":
        gates_NK = logits_NE.sigmoid().gather(-1, index_NK)
        return gates_NK / gates_NK.sum(-1, keepdim=True) * router.routed_scaling_factor
    gates_NK = logits_NE.softmax(-1).gather(-1, index_NK)
    return gates_NK / gates_NK.sum(-1, keepdim=True)


@contextmanager
def forced(family: str, model: nn.Module, experts_TLK: Tensor) -> Iterator[None]:
    """The library's own model, whose routers do not choose."""
    found = [router for _, _, router in routers(model)]
    assert len(found) == experts_TLK.shape[1]

    def forward_of(router: Any, index_NK: Tensor) -> Callable[[Tensor], tuple[None, Tensor, Tensor]]:
        def forward(hidden: Tensor) -> tuple[None, Tensor, Tensor]:
            return None, gates_by_hand(family, router, hidden.view(-1, hidden.shape[-1]), index_NK), index_NK

        return forward

    for number, router in enumerate(found):
        router.forward = forward_of(router, experts_TLK[:, number])
    try:
        yield
    finally:
        for router in found:
            del router.forward


def by_hand(family: str, batch: Batch, experts_BTLK: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the library's model, document by document."""
    model = tiny.build_hf(family).double()
    model.config._experts_implementation = "eager"  # the grouped product has no float64
    total = torch.zeros((), dtype=torch.float64)
    ids, labels = batch.input_ids_BT.flatten(), batch.labels_BT.flatten()
    experts_NLK = experts_BTLK.flatten(0, 1).long()
    bounds = batch.cu_seqlens.tolist()
    for start, end in itertools.pairwise(bounds):
        with forced(family, model, experts_NLK[start:end]):
            logits_TV = model(input_ids=ids[None, start:end], use_cache=False).logits[0]
        total = total + F.cross_entropy(logits_TV, labels[start:end], ignore_index=IGNORE_INDEX, reduction="sum")
    total.backward()
    return total.detach(), {f"model.{name}": grad for name, grad in tiny.gradients(model).items()}


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"])
def test_loss_and_gradients_are_those_of_the_librarys_model_with_the_same_experts_forced(family):
    part = routed_part(family)
    assert part.routing is not None
    layers = len(part.routing.slots)
    batch = microbatch(0, packed=True)
    experts_BTC = given_experts(batch, layers)
    loss, gradients = loss_and_gradients(part, batch.with_columns(**{ROUTED_EXPERTS: experts_BTC}))
    want_loss, want = by_hand(family, batch, experts_BTC.unflatten(-1, (layers, K)))
    torch.testing.assert_close(loss, want_loss, rtol=1e-6, atol=0)  # the head's log-probs are fp32
    assert tiny.gradient_error(want, gradients) < 1e-5
    own_loss, _ = loss_and_gradients(part, batch)
    assert abs(own_loss - loss) > 1e-3 * loss  # other experts than its own indeed


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_its_own_experts_replayed_change_no_bit(family):
    part = routed_part(family)
    batch = microbatch(1, packed=True)
    want_loss, want = loss_and_gradients(part, batch)
    recorder = RouterRecorder()
    with torch.no_grad(), choosing(recorder):
        part(**batch.head_inputs(), **batch.model_inputs())
    column = recorder.stacked(batch.labels_BT.numel()).flatten(1).unflatten(0, batch.shape).to(torch.int16)
    loss, gradients = loss_and_gradients(part, batch.with_columns(**{ROUTED_EXPERTS: column}))
    assert torch.equal(loss, want_loss) and all(torch.equal(gradients[name], want[name]) for name in want)
    assert part.routing is not None and part.routing.tally.counts_2.tolist() == [0, column[..., ::K].numel()]


def test_a_token_of_which_nothing_is_known_goes_where_its_router_sends_it():
    part = routed_part("qwen3_moe")
    batch = microbatch(2, packed=True)
    none = torch.full_like(given_experts(batch, tiny.NUM_LAYERS), -1)
    want_loss, want = loss_and_gradients(part, batch)
    loss, gradients = loss_and_gradients(part, batch.with_columns(**{ROUTED_EXPERTS: none}))
    assert torch.equal(loss, want_loss) and all(torch.equal(gradients[name], want[name]) for name in want)
    assert part.routing is not None and part.routing.tally.counts_2.tolist() == [0, 0]
    half = given_experts(batch, tiny.NUM_LAYERS)
    half[:, ::2] = -1
    seen: list[Tensor] = []
    for experts in experts_modules(part):
        experts.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    with choosing(RouterRecorder()), torch.no_grad():
        part(**batch.head_inputs(), **batch.model_inputs())
    own = seen.copy()
    seen.clear()
    loss_and_gradients(part, batch.with_columns(**{ROUTED_EXPERTS: half}))
    given = half.unflatten(-1, (-1, K))[:, :, 0].flatten(0, 1)  # of the first layer, whose inputs are the same
    known = given[:, 0] >= 0
    assert torch.equal(seen[0][known], given[known].long()) and torch.equal(seen[0][~known], own[0][~known])


def test_a_layer_that_runs_again_goes_to_the_experts_of_its_first_run():
    batches = [microbatch(i, packed=True) for i in range(2)]
    part = routed_part("qwen3_moe")
    replayed = [
        batch.with_columns(**{ROUTED_EXPERTS: given_experts(batch, tiny.NUM_LAYERS, seed=i)})
        for i, batch in enumerate(batches)
    ]

    def both(part: ModelPart) -> dict[str, Tensor]:
        """Two microbatches in flight, the first one's backward last: neither is the newest when it runs again."""
        part.zero_grad()
        outputs = [part(**batch.head_inputs(), **batch.model_inputs()).logprobs_BT.sum() for batch in replayed]
        outputs[1].backward()
        outputs[0].backward()
        return tiny.gradients(part)

    want = both(part)
    counted = part.routing.tally.counts_2.clone()
    again = tiny_part("qwen3_moe")
    apply_activation_checkpointing(transformer_layers(again), "full")
    routing = install_routing([again], selectors_of(again.source_config), CPU)
    gradients = both(again)
    assert tiny.gradient_error(want, gradients) < 1e-6
    assert torch.equal(routing.tally.counts_2, counted)  # and is counted once


def test_a_mismatch_is_a_token_and_layer_with_another_set_of_experts():
    part = routed_part("qwen3_moe")
    batch = microbatch(0, packed=True)
    recorder = RouterRecorder()
    with torch.no_grad(), choosing(recorder):
        part(**batch.head_inputs(), **batch.model_inputs())
    chosen_NLK = recorder.stacked(batch.labels_BT.numel())
    chosen_NLK[:, -1] = chosen_NLK[:, -1].flip(-1)  # the same two in another order
    chosen_NLK[3, -1, 0] = next(e for e in range(NUM_EXPERTS) if e not in chosen_NLK[3, -1].tolist())
    column = chosen_NLK.flatten(1).unflatten(0, batch.shape).to(torch.int16)
    loss_and_gradients(part, batch.with_columns(**{ROUTED_EXPERTS: column}))
    assert part.routing is not None
    assert part.routing.tally.counts_2.tolist() == [1, batch.labels_BT.numel() * tiny.NUM_LAYERS]


def test_a_dense_model_is_refused():
    with raises(ConfigError, "not_supported_by_model", keys=("rollout.replay_routing",), values=("llama",)):
        selectors_of(tiny.tiny_config("llama"))


def test_the_column_stays_with_its_tokens_and_is_taken_out_by_name():
    batch = microbatch(0, packed=True)
    with_it = batch.with_columns(**{ROUTED_EXPERTS: given_experts(batch, 1)})
    assert "routed_experts" in with_it.model_inputs()
    assert with_it.without_column(ROUTED_EXPERTS).model_inputs().keys() == batch.model_inputs().keys()
    assert replace(with_it, extra={}).model_inputs().keys() == batch.model_inputs().keys()
