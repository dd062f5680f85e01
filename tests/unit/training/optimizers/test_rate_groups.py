"""Groups of parameters with own rates, against torch's optimizers with groups written by hand."""

from __future__ import annotations

import pytest
import torch

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.builder import build_part
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.training.optimizers.nodes import AdamW, AdamW8bit, Muon
from automodel_cli.training.optimizers.param_groups import trainable
from automodel_cli.training.optimizers.rate_groups import ParamGroup, Rates, check_groups, num_layers, shown_ratio
from tests import tiny


def _part(lora: LoRAConfig | None = None, device: str = "cpu") -> ModelPart:
    part = build_part(ModelConfig(config=tiny.tiny_fields("llama"), lora=lora), device=device)
    if device == "cpu":
        generator = torch.Generator().manual_seed(0)
        for param in part.parameters():
            param.data.normal_(0, 0.1, generator=generator)
    return part


def _steps(part: ModelPart, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        for param in part.parameters():
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
    return {name: param.detach().clone() for name, param in part.named_parameters()}


def test_adamw_with_groups_is_torchs_with_groups_by_hand():
    groups = [ParamGroup(["mlp"], lr=3e-2), ParamGroup(["layers.1", "embed_tokens"], lr_scale=0.5, weight_decay=0.3)]
    part = _part()
    ours = _steps(part, AdamW(lr=1e-2, weight_decay=0.1, groups=groups).build([part]))
    part = _part()
    by_hand = []
    for name, param in part.named_parameters():
        usual = 0.1 if param.ndim == 2 and "embed" not in name else 0.0
        if ".mlp." in name:
            rate, decay = 3e-2, usual
        elif ".1." in name or "embed" in name:
            rate, decay = 5e-3, 0.3 if param.ndim == 2 else 0.0
        else:
            rate, decay = 1e-2, usual
        by_hand.append({"params": [param], "lr": rate, "weight_decay": decay})
    theirs = _steps(part, torch.optim.AdamW(by_hand, betas=(0.9, 0.95)))
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, msg=name)


def test_layer_decay_lowers_the_rate_by_the_distance_to_the_head():
    part = _part(device="meta")
    node = AdamW(lr=1.0, layer_decay=0.5)
    layers = num_layers([part])
    for item in trainable([part]):
        parts = item.hub_name.split(".")
        below = layers - int(parts[2]) if parts[1] == "layers" else layers + 1 if "embed" in item.hub_name else 0
        assert node.rates([part]).lr(item, 1.0) == 0.5**below, item.hub_name
    optimizer = node.build([part])
    assert shown_ratio(node, optimizer) * optimizer.param_groups[0]["lr"] == 1.0


def test_lora_plus_and_the_algorithm_of_muon():
    part = _part(LoRAConfig(rank=2), device="meta")
    rates = Rates([ParamGroup(["lora_B"], lr_scale=16)])
    assert {rates.lr(item, 1e-4) for item in trainable([part]) if "lora_A" in item.name} == {1e-4}
    assert {rates.lr(item, 1e-4) for item in trainable([part]) if "lora_B" in item.name} == {16e-4}
    node = Muon(
        lr=1e-2, groups=[ParamGroup(["layers.0.mlp"], algorithm="adamw"), ParamGroup(["lm_head"], algorithm="muon")]
    )
    part = _part(device="meta")
    chosen = {item.hub_name for item in trainable([part]) if node.orthogonalizes(item)}
    usual = {item.hub_name for item in trainable([part]) if Muon(lr=1e-2).orthogonalizes(item)}
    assert chosen - usual == {"lm_head.weight"} and all(".0.mlp." in name for name in usual - chosen)
    whole = _part()
    groups = Muon(lr=1e-2, groups=[ParamGroup(["mlp"], lr=5e-2)]).build([whole]).param_groups
    members = {id(param): group for group in groups for param in group["params"]}
    for item in trainable([whole]):
        assert members[id(item.param)]["lr"] == (5e-2 if ".mlp." in item.name else 1e-2), item.name


@pytest.mark.parametrize(
    ("groups", "code", "fix"),
    [
        ([ParamGroup(["mpl"], lr=1e-3)], "unknown_name", "'optimizer.groups.0.params=[mlp]'"),
        ([ParamGroup(["zzzzzz"], lr=1e-3)], "unknown_name", "optimizer.groups=[]"),
        ([ParamGroup(["mlp"]), ParamGroup(["up_proj"])], "no_effect", "optimizer.groups=[]"),
        ([ParamGroup(["norm"], weight_decay=0.1)], "no_effect", "optimizer.groups.0.weight_decay=null"),
        ([ParamGroup(["norm"], algorithm="muon")], "unsupported_combination", "optimizer.groups.0.algorithm=adamw"),
    ],
)
def test_groups_that_do_not_fit_the_model_are_refused(groups, code, fix):
    with pytest.raises(ConfigError) as refusal:
        check_groups(Muon(lr=1e-2, groups=groups), list(trainable([_part(device="meta")])))
    assert (refusal.value.code, refusal.value.fix) == (code, fix)


def test_values_are_checked_without_a_model():
    for make, code in [
        (lambda: ParamGroup([]), "empty_value"),
        (lambda: ParamGroup(["a"], lr=1.0, lr_scale=2.0), "mutually_exclusive"),
        (lambda: ParamGroup(["a"], lr=-1.0), "out_of_range"),
        (lambda: AdamW(lr=1e-3, layer_decay=1.5), "out_of_range"),
        (lambda: AdamW(lr=1e-3, groups=[ParamGroup(["a"], algorithm="muon")]), "unsupported_combination"),
        (lambda: AdamW8bit(lr=1e-3, groups=[ParamGroup(["a"], algorithm="adamw")]), "unsupported_combination"),
    ]:
        with pytest.raises(ConfigError) as refusal:
            make()
        assert refusal.value.code == code
