"""A vision-language repository fine-tuned on rows with pictures through the command line, on one rank and on two."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForImageTextToText, CompressedTensorsConfig

from automodel_cli.cli.main import run
from automodel_cli.run.commands.chat import Speaker, load_pictures
from tests.composites import tensors
from tests.e2e.command import automodel
from tests.errors import assert_error
from tests.vision import repository, rows

CONFIG = """
defaults: [vlm, _self_]
model: {pretrained: original}
data: {path: data/rows.jsonl, seq_len: 128, packing: none, validation_size: 4}
parallelizer: {mp_policy: {param_dtype: float32}}
optimizer: {lr: 0.003}
train: {global_batch_size: 4, microbatch_size: 1, max_steps: 4, epochs: null}
lr_scheduler: {warmup_steps: 1}
checkpoint: {every: 2}
"""


def _project(folder: Path, kind: str = "qwen3_vl") -> Path:
    repository(kind, folder / "original")
    rows(folder / "data", 24)
    (folder / "tiny.yaml").write_text(CONFIG)
    return folder


def _train(folder: Path, name: str, *overrides: str) -> list[dict]:
    done = automodel(folder, "finetune", "vlm", "-c", "tiny.yaml", f"run_name={name}", *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["qwen3_vl", pytest.param("llava", marks=pytest.mark.nightly)])
def test_two_ranks_some_without_pictures_train_as_one(kind: str, tmp_path: Path):
    _project(tmp_path, kind)
    one = _train(tmp_path, "one")
    for name, override in (
        ("fsdp2", ()),
        ("ddp", ("parallelizer=ddp", "~parallelizer.mp_policy", "parallelizer.find_unused_parameters=true")),
    ):
        two = _train(tmp_path, name, "mesh.dp_size=2", *override)
        for a, b in zip(one, two, strict=True):
            assert abs(a["loss"] - b["loss"]) < 2e-6 * a["loss"]
            assert abs(a["grad_norm"] - b["grad_norm"]) < 1e-5 * a["grad_norm"]
    exported, weights = tensors(tmp_path / "runs/one/export"), tensors(tmp_path / "runs/fsdp2/export")
    assert max((exported[name] - weights[name]).abs().max().item() for name in exported) < 1e-4


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["qwen3_vl", "llava", "qwen3_vl_moe", "gemma3"])
def test_layouts_train_and_export_as_one_rank(kind: str, tmp_path: Path):
    _project(tmp_path, kind)
    layouts = {
        "pp": ("mesh.pp_size=2", "pipeline=1f1b"),
        "tp": ("mesh.tp_size=2", "parallelizer.sequence_parallel=true", "data.pad_to_multiple_of=2"),
        "cp": ("mesh.cp_size=2",),
    }
    layouts |= {"ep": ("mesh.ep_size=2",)} if kind.endswith("moe") else {}
    one, weights = _train(tmp_path, "one"), tensors(tmp_path / "runs/one/export")
    for name, overrides in layouts.items():
        for a, b in zip(one, _train(tmp_path, name, *overrides), strict=True):
            assert abs(a["loss"] - b["loss"]) < 2e-6 * a["loss"], name
            assert abs(a["grad_norm"] - b["grad_norm"]) < 1e-5 * a["grad_norm"], name
        exported = tensors(tmp_path / "runs" / name / "export")
        assert exported.keys() == weights.keys(), name
        assert max((exported[key] - weights[key]).abs().max().item() for key in weights) < 2e-4, name
        AutoModelForImageTextToText.from_pretrained(tmp_path / "runs" / name / "export")


@pytest.mark.nightly
def test_the_text_model_is_quantized_and_the_layers_of_pictures_are_not(tmp_path: Path):
    matching = pytest.importorskip("compressed_tensors.utils.match")
    _project(tmp_path)
    given = ("run_name=four", "model.vision.tower=frozen", "model.vision.projector=frozen")
    qat = "model.qat={weight_dtype: int4, group_size: 16}"
    done = automodel(tmp_path, "finetune", "vlm", "-c", "tiny.yaml", *given, qat)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reloaded with transformers" in done.stdout and done.stdout.count("quantized to int4") == 2
    before, after = tensors(tmp_path / "original"), tensors(tmp_path / "runs/four/export")
    packed = {key.removesuffix("_packed") for key in after if key.endswith("weight_packed")}
    layers = {key for key in before if "language_model.layers" in key and key.endswith("proj.weight")}
    assert packed == layers and layers
    assert all(torch.equal(before[key], after[key]) for key in before if "visual" in key)
    config = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "runs/four/export", quantization_config=config)
    quantization = json.loads((tmp_path / "runs/four/export/config.json").read_text())["quantization_config"]
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    quantized = {key.removesuffix(".weight") for key in layers}
    assert linear - quantized == linear & set(quantization["ignore"])
    layer, ignore = torch.nn.Linear(1, 1), quantization["ignore"]
    assert matching.is_match("visual.tower.blocks.0.attn.qkv", layer, ignore)  # as an engine may name it
    assert not any(matching.is_match(name, layer, ignore) for name in quantized)


@pytest.mark.slow
def test_a_first_stage_without_the_layers_of_pictures_is_refused(tmp_path: Path):
    _project(tmp_path)
    given = ("mesh.pp_size=2", "pipeline=1f1b", "pipeline.layout=Et|ttL")
    done = automodel(tmp_path, "finetune", "vlm", "-c", "tiny.yaml", *given)
    assert done.returncode != 0
    assert_error(done.stdout + done.stderr, "stage_count", "pipeline.layout")


@pytest.mark.slow
def test_the_export_is_the_repository_with_trained_weights_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    _project(tmp_path)
    _train(tmp_path, "all")
    _train(tmp_path, "text", "model.vision.tower=frozen", "model.vision.projector=frozen")
    _train(tmp_path, "tower", "model.vision.text=frozen", "model.vision.projector=frozen")
    before = tensors(tmp_path / "original")
    for name, trained in (
        ("all", lambda key: True),
        ("text", lambda key: "visual" not in key),
        ("tower", lambda key: "visual.blocks" in key or "visual.pos_embed" in key or "visual.patch_embed" in key),
    ):
        export = tmp_path / "runs" / name / "export"
        after = tensors(export)
        assert before.keys() == after.keys()
        changed = {key for key in before if not torch.equal(before[key], after[key])}
        assert changed, name
        assert all(trained(key) for key in changed), (name, sorted(key for key in changed if not trained(key))[:3])
        for file in (tmp_path / "original").iterdir():
            if file.suffix != ".safetensors" and file.name != "generation_config.json":
                assert (export / file.name).read_bytes() == file.read_bytes(), file.name
    AutoModelForImageTextToText.from_pretrained(tmp_path / "runs/all/export")
    _answers_are_those_of_generate(tmp_path)
    _chat_reads_pictures(tmp_path, monkeypatch, capsys)
    assert any("visual.blocks" in key for key in before)


def _answers_are_those_of_generate(folder: Path) -> None:
    """Samples of the report against `generate` of transformers with the repository's processor."""
    samples = json.loads((folder / "runs/all/run.json").read_text())["samples"]
    assert len(samples) >= 2 and any(sample["after"] != sample["before"] for sample in samples)
    by_answer = {row["messages"][1]["content"]: row for row in map(json.loads, (folder / "data/rows.jsonl").open())}
    num_new = max(len(sample["expected"].split()) for sample in samples) + 1 + 8
    for when, place in (("before", "original"), ("after", "runs/all/export")):
        speaker = Speaker.load("x", str(folder / place))
        for sample in samples:
            row = by_answer[sample["expected"]]
            assert len(sample["pictures"]) == len(row["images"])
            pictures = load_pictures([speaker], [str(folder / "data" / name) for name in row["images"]])
            speaker.forget()
            question = row["messages"][0]["content"].rpartition("<image>")[2]
            options = {"max_new_tokens": num_new, "do_sample": False, "suppress_tokens": [2]}
            found = "".join(speaker.answer(question, options, pictures)).strip()
            assert found == sample[when], (when, sample)


def _chat_reads_pictures(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(folder)
    shown: list[int] = []

    def answer(self: Speaker, question: str, options: Any, pictures: Any = ()) -> Iterator[str]:
        shown.append(len(pictures))
        return original(self, question, options, pictures)

    original = Speaker.answer
    monkeypatch.setattr(Speaker, "answer", answer)
    one, other = (str(path) for path in sorted((folder / "data").glob("*.png"))[:2])
    chat = ["chat", "all", "--max-new-tokens", "4", "--image", one]
    for more, typed, counts in (
        (["--image", other, "--compare", "text"], "what is here\nand there\n", [2, 2, 2, 2]),
        (["--one-conversation"], f"a\nno\n/image {other}\n/image missing.png\nis here\n/new\na\n", [1, 0, 1, 1]),
    ):
        shown.clear()
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        assert run([*chat, *more]) == 0
        assert shown == counts
    assert "missing.png" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert run([*chat, "--image", "missing.png"]) != 0
    assert_error(capsys.readouterr().err, "unreadable_file", "--image")


ADAPTERS = ("model.lora={rank: 4}", "model.vision.tower=adapters", "model.vision.projector=adapters")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("qwen3_vl", ADAPTERS),
        pytest.param("llava", ADAPTERS, marks=pytest.mark.nightly),
        pytest.param("llava", (*ADAPTERS, "mesh.pp_size=2", "pipeline=1f1b"), marks=pytest.mark.nightly),
        pytest.param(
            "llava",
            (
                "model.lora={rank: 4, target_modules: [q_proj], modules_to_save: [multi_modal_projector]}",
                "model.vision.tower=frozen",
                "model.vision.projector=adapters",
            ),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_peft_reads_the_adapter_on_the_composite(kind: str, overrides: tuple[str, ...], tmp_path: Path):
    """CLIP towers have layers with the names of the text model (`q_proj`), which must stay as they are if frozen."""
    _project(tmp_path, kind)
    _train(tmp_path, "lora", *overrides, "optimizer.lr=0.02")
    export = tmp_path / "runs/lora/export"
    base, merged = (
        AutoModelForImageTextToText.from_pretrained(folder).eval() for folder in (tmp_path / "original", export)
    )
    row = next(row for row in map(json.loads, (tmp_path / "data/rows.jsonl").open()) if row["images"])
    speaker = Speaker.load("x", str(export))
    pictures = load_pictures([speaker], [str(tmp_path / "data" / name) for name in row["images"]])
    parts = [*({"type": "image"} for _ in pictures), {"type": "text", "text": "what is here"}]
    speaker.messages.append({"role": "user", "content": parts})
    speaker.pictures += pictures
    inputs = speaker._inputs("")

    def logprobs(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(**inputs).logits.log_softmax(-1)

    plain, want = logprobs(base), logprobs(merged)
    got = logprobs(PeftModel.from_pretrained(base, str(export / "adapter")).eval())
    assert (want - plain).abs().max() > 1e-2, "training changed the model"
    assert (got - want).abs().max() < 2e-5


def _continues_adapters(folder: Path) -> None:
    """A resumed run ends with the same adapters, and a run without steps that reads them exports the same model."""
    _train(folder, "adapters", "lr_scheduler=constant", *ADAPTERS)
    _train(folder, "first", "train.max_steps=2", "lr_scheduler=constant", *ADAPTERS)
    done = automodel(folder, "resume", "first", "train.max_steps=4")
    assert done.returncode == 0, done.stdout + done.stderr
    export = folder / "runs/adapters/export"
    again = (
        f"model.lora={{pretrained: {export}/adapter}}",
        "optimizer.lr=1e-12",
        "lr_scheduler.warmup_steps=0",
        *ADAPTERS[1:],
    )
    _train(folder, "again", "train.max_steps=1", *again)
    straight, first, read = (tensors(folder / "runs" / name / "export") for name in ("adapters", "first", "again"))
    assert all(torch.equal(straight[key], first[key]) for key in straight)
    assert all((straight[key] - read[key]).abs().max() < 1e-6 for key in straight)


@pytest.mark.nightly
def test_a_resumed_run_ends_with_the_weights_of_one_run_and_refuses_an_edited_picture(tmp_path: Path):
    _project(tmp_path)
    _train(tmp_path, "halves", "train.max_steps=2", "lr_scheduler=constant")
    _train(tmp_path, "straight", "lr_scheduler=constant")
    done = automodel(tmp_path, "resume", "halves", "train.max_steps=4")
    assert done.returncode == 0, done.stdout + done.stderr
    halves, straight = (tensors(tmp_path / "runs" / name / "export") for name in ("halves", "straight"))
    assert all(torch.equal(halves[key], straight[key]) for key in straight)
    _continues_adapters(tmp_path)

    picture = next((tmp_path / "data").glob("*.png"))
    other = next(file for file in (tmp_path / "data").glob("*.png") if file.read_bytes() != picture.read_bytes())
    picture.write_bytes(other.read_bytes())
    done = automodel(tmp_path, "resume", "halves", "train.max_steps=6")
    assert done.returncode != 0
    assert_error(done.stdout + done.stderr, "checkpoint_mismatch")


@pytest.mark.parametrize(
    ("overrides", "code", "key"),
    [
        (("parallelizer=megatron_fsdp", "~parallelizer.mp_policy"), "unsupported_combination", "parallelizer"),
        (
            ("parallelizer=ddp", "~parallelizer.mp_policy"),
            "requires_setting",
            "parallelizer.find_unused_parameters",
        ),
        (("data.truncation=split",), "unsupported_combination", "data.truncation"),
        (("model.vision=null",), "requires_setting", "model.vision"),
        (("data.loss_mask=all",), "unsupported_combination", "data.loss_mask"),
        (("model.lora={}",), "requires_setting", "model.lora"),
        (("model.attn_implementation=sdpa",), "unsupported_combination", "model.attn_implementation"),
        (("_target_=automodel_cli.recipes.sft.SFTRecipe",), "unsupported_combination", "model.vision"),
    ],
)
def test_unsupported_settings_are_refused_before_anything_is_built(
    overrides: tuple[str, ...], code: str, key: str, tmp_path: Path
):
    (tmp_path / "tiny.yaml").write_text(CONFIG)
    done = automodel(tmp_path, "finetune", "llm", "-c", "tiny.yaml", *overrides)
    assert done.returncode != 0
    assert_error(done.stdout + done.stderr, code, key)
    assert not (tmp_path / "runs").exists()
