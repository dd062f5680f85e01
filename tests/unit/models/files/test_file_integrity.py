"""Model folders that were cut, emptied or edited: each file is named, and nothing ends in a traceback."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.files import file_integrity
from automodel_cli.models.hub import source
from automodel_cli.models.tokenizer import ByteTokenizer, load_tokenizer
from tests import tiny
from tests.errors import raises


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    torch.manual_seed(0)
    tokenizer = ByteTokenizer().build()
    tiny.build_hf("llama", vocab_size=len(tokenizer), eos_token_id=1).save_pretrained(folder, max_shard_size="100KB")
    tokenizer.save_pretrained(folder)
    assert (folder / file_integrity.INDEX).is_file()
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    for path in whole.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def read_all(folder: Path) -> None:
    config = ModelConfig(pretrained=str(folder))
    source.weights(config)
    source.hf_config(config)
    source.stop_ids(config)
    load_tokenizer(config)


def edit(name: str, **fields: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))

    return change


def cut(name: str, end: float = 0.5) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = next(folder.glob(name))
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * end)])

    return change


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: next(folder.glob(name)).write_bytes(content) and None


SHARD = "model-00001*.safetensors"
DAMAGES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "cut index": (file_integrity.INDEX, cut(file_integrity.INDEX)),
    "empty index": (file_integrity.INDEX, write(file_integrity.INDEX, b"")),
    "index without a map": (file_integrity.INDEX, write(file_integrity.INDEX, b"{}")),
    "index that is a list": (file_integrity.INDEX, write(file_integrity.INDEX, b"[]")),
    "index that leads out": (file_integrity.INDEX, edit(file_integrity.INDEX, weight_map={"a": "../a.safetensors"})),
    "index of numbers": (file_integrity.INDEX, edit(file_integrity.INDEX, weight_map={"a": 1})),
    "missing shard": ("model-00001-of-", lambda folder: next(folder.glob(SHARD)).unlink()),
    "cut shard": ("model-00001-of-", cut(SHARD)),
    "shard cut in its header": ("model-00001-of-", cut(SHARD, 0.001)),
    "empty shard": ("model-00001-of-", write(SHARD, b"")),
    "shard with a huge header": ("model-00001-of-", write(SHARD, (1 << 62).to_bytes(8, "little") + b"{}")),
    "shard with an odd header": ("model-00001-of-", write(SHARD, (2).to_bytes(8, "little") + b"[]")),
    "cut config": ("config.json", cut("config.json")),
    "config that is a text": ("config.json", write("config.json", b'"x"')),
    "deep config": ("config.json", write("config.json", b"[" * 100_000)),
    "config with a text for a number": ("config.json", edit("config.json", hidden_size="64")),
    "config with too many layers": ("config.json", edit("config.json", num_hidden_layers=10**9)),
    "cut tokenizer": ("tokenizer.json", cut("tokenizer.json")),
    "cut tokenizer config": ("tokenizer_config.json", cut("tokenizer_config.json")),
    "cut generation config": ("generation_config.json", cut("generation_config.json")),
    "stop beyond the vocabulary": ("generation_config.json", edit("generation_config.json", eos_token_id=999_999_999)),
    "negative stop": ("generation_config.json", edit("generation_config.json", eos_token_id=[1, -1])),
}


def test_a_whole_folder_is_read(folder: Path) -> None:
    read_all(folder)


@pytest.mark.parametrize("name", DAMAGES)
def test_the_damaged_file_is_named(folder: Path, name: str) -> None:
    file, damage = DAMAGES[name]
    damage(folder)
    code = "vocabulary_mismatch" if "stop" in name else "damaged_file"
    with raises(ConfigError, code, keys=("pretrained",), values=(folder,)) as error:
        read_all(folder)
    assert file in str(error.value) and error.value.fix is not None


@pytest.mark.parametrize(
    "fields", [{"rope_scaling": 3}, {"num_attention_heads": [1]}, {"torch_dtype": "x"}, {"model_type": 7}]
)
def test_a_config_that_the_library_refuses_is_no_traceback(folder: Path, fields: dict[str, object]) -> None:
    edit("config.json", **fields)(folder)
    with contextlib.suppress(ConfigError):  # some the library takes
        read_all(folder)


def test_a_tokenizer_of_another_form_is_no_traceback(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": {"type": "no such"}}')
    with raises(ConfigError, "model_not_found", keys=("tokenizer",), values=(folder,)):
        read_all(folder)
