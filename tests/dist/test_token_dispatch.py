"""Dispatchers against the plain sum over experts, in whole numbers, so that bfloat16 is exact and equal means equal."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.expert_parallel.deep_ep import DeepEP, require_deep_ep
from automodel_cli.distributed.expert_parallel.token_dispatcher import AllToAll, exchange
from automodel_cli.distributed.mesh_config import MeshConfig
from tests.dist import deep_ep_stand_in
from tests.dist.harness import launch, launch_all
from tests.errors import raises

NUM_EXPERTS, TOKENS, WIDTH = 6, 5, 4


def _tokens(rank, crowded):
    """(hidden, experts, weights) of a rank; crowded: nobody wants an expert of the last rank."""
    generator = torch.Generator().manual_seed(rank)
    hidden_TD = torch.randint(-3, 4, (TOKENS, WIDTH), generator=generator).bfloat16()
    experts = NUM_EXPERTS // 3 * 2 if crowded else NUM_EXPERTS
    index_TK = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in range(TOKENS)])
    weight_TK = 2.0 ** torch.randint(-1, 2, (TOKENS, 2), generator=generator)
    return hidden_TD.requires_grad_(), index_TK, weight_TK.requires_grad_()


def _weights():
    return torch.randint(-2, 3, (NUM_EXPERTS, WIDTH), generator=torch.Generator().manual_seed(99)).bfloat16()


def _dispatched(rank, world, backend, crowded):
    """Whether result and all gradients are those of the plain sum, on this rank."""
    deep_ep_stand_in.install()
    hidden_TD, index_TK, weight_TK = _tokens(rank, crowded)
    num_local = NUM_EXPERTS // world
    mine = _weights()[rank * num_local : (rank + 1) * num_local].clone().requires_grad_()
    dispatch = backend(num_local, dist.group.WORLD)
    result_TD = dispatch(hidden_TD, index_TK, weight_TK, lambda hidden_ND, expert_N: hidden_ND * mine[expert_N])
    result_TD.backward(torch.full_like(result_TD, 1 + rank))

    whole = _weights().requires_grad_()
    for r in range(world):
        hidden, index, weight = _tokens(r, crowded)
        expected = (hidden[:, None] * whole[index] * weight[..., None]).sum(1)
        expected.backward(torch.full_like(expected, 1 + r))
        if r == rank:
            same = [(result_TD, expected), (hidden_TD.grad, hidden.grad), (weight_TK.grad, weight.grad)]
    same.append((mine.grad, whole.grad[rank * num_local : (rank + 1) * num_local]))
    return [torch.equal(got.float(), want.float()) for got, want in same]


@pytest.mark.parametrize("crowded", [False, True], ids=["", "a rank without tokens"])
@pytest.mark.parametrize("backend", [AllToAll, DeepEP])
def test_result_and_gradients_are_those_of_the_plain_sum(backend, crowded):
    assert launch_all(_dispatched, 3, backend, crowded) == [[True] * 4] * 3


def _dropped(rank, world):
    """Whether an exchange has ended when the last reference to it has gone. The second rank is late."""
    time.sleep(0.5 * rank)
    arriving = exchange(torch.full((2, 3), float(rank)), [1, 1], [1, 1], dist.group.WORLD)
    rows, work = arriving.rows, arriving.work
    del arriving
    return work.is_completed(), rows[:, 0].tolist()


def test_an_exchange_that_nobody_asks_for_is_over_before_its_memory_is_free():
    assert launch_all(_dropped, 2) == [(True, [0.0, 1.0])] * 2


def _refuses_float32(rank, world):
    dispatch = DeepEP(2, dist.group.WORLD)
    with raises(ConfigError, "unsupported_combination", values=("torch.float32",)):
        dispatch(torch.ones(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), lambda *_: None)


def test_deep_ep_is_refused_where_it_cannot_run():
    launch(_refuses_float32, 1)
    with raises(ConfigError, "missing_package", values=("deep_ep",)) as caught:
        require_deep_ep("cuda")
    assert caught.value.fix.startswith("pip install ")
    keys = ("parallelizer.expert_dispatch", "mesh.ep_size")
    with raises(ConfigError, "no_effect", keys=keys, values=("deepep", "mesh.ep_size=1")):
        FSDP2Config(expert_dispatch="deepep").check_mesh(MeshConfig())
    with raises(ConfigError, "invalid_choice", keys=("expert_dispatch",), values=("nccl", "all_to_all", "deepep")):
        FSDP2Config(expert_dispatch="nccl")


def test_layers_that_keep_their_products_are_not_compiled_around_a_dispatch():
    config = FSDP2Config(enable_compile=True, activation_checkpointing="selective")
    config.check_mesh(MeshConfig())
    replace(config, activation_checkpointing="full").check_mesh(MeshConfig(ep_size=2))
    with raises(ConfigError, "unsupported_combination", values=("selective", "mesh.ep_size=2")):
        config.check_mesh(MeshConfig(ep_size=2))
