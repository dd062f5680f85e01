"""Which child of a block may compute while its experts wait, and that only a call with the block's own input is
answered with what it computed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from automodel_cli.distributed.expert_parallel.apply import is_experts
from automodel_cli.distributed.expert_parallel.shared_expert_overlap import SharedExperts, find_shared_expert
from tests import tiny

_OTHERS = {
    "glm4_moe": {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 16},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "head_dim": 16},
    "qwen2_moe": {"num_experts": 8, "shared_expert_intermediate_size": 32},  # before its experts
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_num_shared_experts": 1, "moe_k": 2},  # before its experts
}


def _block(family: str) -> tuple[nn.Module, nn.Module]:
    """The last block with experts, and those."""
    if family in tiny.FAMILIES:
        model = tiny.build_hf(family)
    else:
        from transformers import CONFIG_MAPPING, AutoModelForCausalLM

        fields = {**tiny.tiny_fields("qwen3_moe"), **_OTHERS[family]}
        fields.pop("model_type")
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**fields))
    return [(block, child) for block in model.modules() for child in block.children() if is_experts(child)][-1]


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "dots1"])
def test_shared_experts_are_found_where_experts_are_called_first(family: str) -> None:
    block, experts = _block(family)
    before = {name: param.clone() for name, param in block.named_parameters()}
    assert find_shared_expert(block, experts) is block.shared_experts
    assert all(torch.equal(param, before[name]) for name, param in block.named_parameters())
    assert not any("forward" in vars(module) for module in block.modules() if module is not experts)
    assert find_shared_expert(block.to("meta"), experts) is block.shared_experts


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "qwen2_moe", "ernie4_5_moe"])
def test_there_are_none_or_they_come_first(family: str) -> None:
    assert find_shared_expert(*_block(family)) is None


class _Block(nn.Module):
    """Experts, and something that is given `given(x)`."""

    def __init__(self, given) -> None:
        super().__init__()
        self.experts, self.shared = _block("qwen3_moe")[1], nn.Linear(64, 64)
        self.given, self.runs = given, None

    def forward(self, x: Tensor) -> Tensor:
        index_TK = torch.zeros(x.numel() // 64, 2, dtype=torch.int64, device=x.device)
        y = self.experts(x.view(-1, 64), index_TK, torch.ones_like(index_TK, dtype=x.dtype)).view(x.shape)
        if self.runs is not None:
            self.runs.run()
        return y + self.shared(self.given(x))


@pytest.mark.parametrize(
    "given",
    [lambda x: x.clone(), lambda x: x * (x.sum().item() > 0), lambda x: x.view(-1, 64)[None]],
    ids=["another tensor", "a value is read", "another shape"],
)
def test_none_is_found_that_is_given_something_else(given) -> None:
    block = _Block(given)
    assert find_shared_expert(block, block.experts) is None
    same = _Block(lambda x: x)
    assert find_shared_expert(same, same.experts) is same.shared


def test_the_familys_call_is_handed_what_was_computed_once() -> None:
    block = _Block(lambda x: x)
    x = torch.randn(1, 5, 64)
    want, calls = block(x), []
    block.shared.register_forward_hook(lambda *_: calls.append("family"))
    own = block.shared.forward
    block.shared.forward = lambda x: (calls.append("computed"), own(x))[1]
    block.runs = SharedExperts.of(block, block.experts)
    assert torch.equal(block(x), want)
    assert calls == ["computed", "family"]
    assert torch.equal(block.shared(x), own(x)), "nothing is left for a later call"


def test_a_call_with_anything_else_computes_what_it_is_given() -> None:
    block = _Block(lambda x: x)
    block.runs = SharedExperts.of(block, block.experts)
    x = torch.randn(1, 5, 64)
    plain = nn.Linear.forward
    block.given = lambda x: 2 * x
    with torch.no_grad():
        got = block(x) - block.experts(x.view(-1, 64), *_to_the_first(5)).view(x.shape)
    torch.testing.assert_close(got, plain(block.shared, 2 * x))


def _to_the_first(tokens: int) -> tuple[Tensor, Tensor]:
    index_TK = torch.zeros(tokens, 2, dtype=torch.int64)
    return index_TK, torch.ones(tokens, 2)
