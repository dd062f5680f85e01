"""Stages balanced by what is trained, against an exhaustive search over all splits of closed-form costs."""

from __future__ import annotations

import itertools

import pytest

from automodel_cli.config.parameter_patterns import EVERYTHING, Selection
from automodel_cli.data.head_output import HeadRequest
from automodel_cli.models.builder import build_part
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.freezing import freeze
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.pipelining.config import PipelineConfig
from automodel_cli.pipelining.cut.split_check import check_split
from automodel_cli.pipelining.cut.stage_plan import plan_stages

D, F, V, LAYERS, RANK = 32, 80, 1200, 8, 4
FIELDS = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
NORMS, MLP = 2 * D, 3 * D * F
LAYER = 2 * D * D + 2 * D * (D // 2) + MLP + NORMS
HEAD = D * V + D
ADAPTERS = RANK * (2 * (D + D) + 2 * (D + D // 2) + 3 * (D + F))
LOW = Selection(("embed_tokens", "layers.[0-4]"))


def three(forward: int, inputs: int, weights: int) -> int:
    """Each of the three costs two FLOPs for a weight, so the factor is left out."""
    return forward + inputs + weights


FROZEN, PASSED, TRAINED = (three(LAYER, *rest) for rest in ((0, 0), (LAYER, 0), (LAYER, LAYER)))
WHOLE_HEAD = three(HEAD, HEAD, HEAD)
ADAPTED = three(LAYER + ADAPTERS, LAYER + ADAPTERS, ADAPTERS)
NO_MLP = three(LAYER, LAYER, LAYER - MLP)
CASES = {
    "everything": (EVERYTHING, None, [TRAINED] * 8, WHOLE_HEAD),
    "low": (LOW, None, [FROZEN] * 5 + [TRAINED] * 3, WHOLE_HEAD),
    "mlp": (Selection(("mlp", "lm_head")), None, [NO_MLP] * 8, three(HEAD, HEAD, D)),
    "table": (Selection((), ("embed_tokens",)), None, [PASSED] * 8, three(HEAD, HEAD, 0)),
    "head": (Selection((), ("lm_head",)), None, [FROZEN] * 8, three(HEAD, 0, HEAD - D)),
    "lora": (EVERYTHING, LoRAConfig(rank=RANK), [ADAPTED] * 8, three(HEAD, HEAD, 0)),
    "lora_high": (
        EVERYTHING,
        LoRAConfig(rank=RANK, layers_to_transform=(6, 7)),
        [FROZEN] * 6 + [ADAPTED] * 2,
        three(HEAD, HEAD, 0),
    ),
}


def costs_of(sizes: tuple[int, ...], layers: list[int], head: int) -> list[int]:
    ends = [*itertools.accumulate(sizes)]
    costs = [sum(layers[end - size : end]) for size, end in zip(sizes, ends, strict=True)]
    return [*costs[:-1], costs[-1] + head]


def balanced(part: ModelPart, num_stages: int) -> tuple[int, ...]:
    plan = plan_stages(PipelineConfig(balance="cost"), part, check_split(part.model), num_stages)
    return tuple(len(stage) for stage in plan.layers)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_head_without_logits_costs_nothing(is_tied: bool) -> None:
    config = ModelConfig(config={**FIELDS, "tie_word_embeddings": is_tied})
    assert balanced(build_part(config, request=HeadRequest(scores=2, logprobs=False)), 2) == (4, 4)
    assert balanced(build_part(config), 2) == (6, 2)


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("case", CASES)
def test_no_split_has_a_cheaper_slowest_stage(case: str, num_stages: int) -> None:
    selection, lora, layers, head = CASES[case]
    part = build_part(ModelConfig(config=FIELDS, lora=lora))
    freeze(part, selection)
    found = balanced(part, num_stages)
    every = [s for s in itertools.product(range(1, LAYERS), repeat=num_stages) if sum(s) == LAYERS]
    costs = {sizes: costs_of(sizes, layers, head) for sizes in every}
    slowest = min(max(of) for of in costs.values())
    best = [sizes for sizes, of in costs.items() if max(of) == slowest]
    assert found in best
    assert sum(c * c for c in costs[found]) == min(sum(c * c for c in costs[sizes]) for sizes in best)


def test_a_split_backward_has_input_gradients_in_every_layer_behind_the_first_stage() -> None:
    part = build_part(ModelConfig(config=FIELDS))
    freeze(part, Selection(("embed_tokens", "layers.[0-5]")))
    anatomy = check_split(part.model)
    whole, split = (plan_stages(PipelineConfig(schedule=name), part, anatomy, 4) for name in ("1f1b", "zb_h1"))
    assert [whole.sends_gradients(stage) for stage in range(1, 4)] == [False, False, False]
    assert [split.sends_gradients(stage) for stage in range(1, 4)] == [True, True, True]
    assert [whole.lowest_backward(stage) for stage in range(4)] == [6] * 4
    assert [split.lowest_backward(stage) for stage in range(4)] == [6, 2, 4, 6]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        (EVERYTHING, [True, True, True]),
        (Selection(("embed_tokens",)), [False, True, True]),
        (Selection(("embed_tokens", "layers.[0-3]")), [False, False, True]),
        (Selection((), ("lm_head",)), [False, False, False]),
    ],
)
def test_gradients_are_sent_to_stages_with_trained_parameters(selection: Selection, expected: list[bool]) -> None:
    part = build_part(ModelConfig(config=FIELDS))
    freeze(part, selection)
    plan = plan_stages(PipelineConfig(layout="E|t*4|t*4|L"), part, check_split(part.model), 4)
    assert [plan.sends_gradients(stage) for stage in range(1, 4)] == expected
