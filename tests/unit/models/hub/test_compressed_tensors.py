"""Lazy reading of compressed-tensors checkpoints: the weights of compressed-tensors, in any part."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.hub import compressed_tensors as files
from automodel_cli.models.hub.dequantize import check_quantization, dequantized
from tests.errors import raises
from tests.unit.distributed.qat.test_formats import SCHEMES, fake, matrix, settings


@pytest.mark.parametrize(("name", "group", "activations"), SCHEMES)
def test_parts_of_a_weight_are_those_of_the_forward_pass(name, group, activations, tmp_path):
    qat, weight = settings(name, group, activations), matrix()
    stored = dict(files.compressed("a.weight", weight, qat, weight.abs().amax(), torch.float32))
    save_file({**stored, "norm.weight": torch.ones(3)}, tmp_path / "x.safetensors")
    config = files.quantization_config(qat)
    check_quantization(config, "x")
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        lazy = dequantized({key: file.get_slice(key) for key in file.keys()}, config)  # noqa: SIM118
        assert set(lazy) == {"a.weight", "norm.weight"}
        whole = fake(weight, qat.weights)
        assert lazy["a.weight"].get_shape() == list(weight.shape)
        assert torch.equal(lazy["a.weight"][...].float(), whole)
        assert torch.equal(lazy["a.weight"][7:19, 11:70].float(), whole[7:19, 11:70])


def test_packed_columns_are_padded():
    coded = torch.arange(-8, 5).float().expand(2, 13)
    packed = files.pack_integers(coded, 4)
    assert packed.shape == (2, 2)
    assert packed[0, 0].item() & 0xF == 0  # -8 is stored as 0, in the lowest bits
    assert torch.equal(files.unpack_integers(packed, 4)[:, :13], coded)


@pytest.mark.parametrize(
    "changed",
    [
        {"format": "marlin-24"},
        {"symmetric": False},
        {"strategy": "block"},
        {"num_bits": 6},
    ],
)
def test_other_schemes_are_refused(changed):
    config = files.quantization_config(settings("int4", 32, None))
    (group,) = config["config_groups"].values()
    (config if "format" in changed else group["weights"]).update(changed)
    with raises(ConfigError, "not_supported", keys=("pretrained",)):
        check_quantization(config, "x")
