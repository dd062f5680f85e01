"""The comparison of an export with its trained model: what it lets pass, what it does not, and what it costs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf, rounds_weights, trained_values
from automodel_cli.models.checkpoint_io.export_check import Agreement, Precision, measure_export_error
from automodel_cli.models.checkpoint_io.export_values import PictureDocument, Unfinished
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.lora import merge as lora_merge
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.precision.layerwise_casting import Cast, cast_layers, largest_forward
from automodel_cli.models.precision.stochastic_rounding import moved_within_ulp
from automodel_cli.models.vision.processor import FamilyProcessor
from automodel_cli.pipelining.cut.cut_stage import cut_stage
from automodel_cli.pipelining.cut.split_check import check_split
from tests.errors import raises
from tests.tiny import build_hf, packed_batch, token_row
from tests.vision import config_of, documents_of, processor_of, repository

ROWS = [[token_row(9), token_row(6, 1)]]
PROMPTS = [token_row(24, seed).tolist() for seed in range(8)]


def adapted(folder: Path, dtype: torch.dtype, *, tied: bool = False, steps: int = 3) -> tuple[ModelPart, ModelConfig]:
    """A model with adapters on its attention and its head, after some large steps. It computes in its own dtype."""
    build_hf("llama", tie_word_embeddings=tied).to(dtype).save_pretrained(folder)
    targets = ["q_proj", "v_proj", "lm_head"]
    config = ModelConfig(
        pretrained=str(folder),
        dtype=str(dtype).removeprefix("torch."),
        lora=LoRAConfig(rank=4, alpha=8.0, target_modules=targets),
    )
    part = build_part(config)
    load_weights(part, config, device="cpu", seed=0)
    batch = packed_batch(ROWS)
    optimizer = torch.optim.SGD([p for p in part.parameters() if p.requires_grad], lr=0.5)
    for _ in range(steps):
        part(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT.mean().neg().backward()
        optimizer.step()
        optimizer.zero_grad()
    return part, config


def compared(part: ModelPart, folder: Path) -> Agreement:
    precision = Precision(part.model.dtype, rounds_weights([part]))
    return measure_export_error(folder, PROMPTS, trained_values([part], PROMPTS), precision)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_merge_passes_and_wrong_ones_do_not(dtype: torch.dtype, tmp_path: Path, monkeypatch):
    part, config = adapted(tmp_path / "base", dtype)
    export_hf([part], config, None, tmp_path / "right")
    assert compared(part, tmp_path / "right").passed
    true = lora_merge.delta
    for factor in (0.0, 2.0):
        monkeypatch.setattr(lora_merge, "delta", lambda *args, by=factor: by * true(*args))
        export_hf([part], config, None, tmp_path / f"times{factor}")
        found = compared(part, tmp_path / f"times{factor}")
        assert not found.passed and found.mean > 3 * found.mean_allowed


def test_a_merge_of_twice_the_update_shows_below_the_noise_of_rounding(tmp_path: Path, monkeypatch):
    """A short run: stored in bfloat16, the update costs each token less than rounding does."""
    torch.manual_seed(0)
    part, config = adapted(tmp_path / "base", torch.bfloat16, steps=0)
    config = dataclasses.replace(config, dtype="float32")
    part = build_part(config)
    load_weights(part, config, device="cpu", seed=0)
    for _, layer in lora.wrappers(part.model):
        torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.0012)
    precision = Precision(torch.float32, rounds_weights([part]))
    ours = trained_values([part], PROMPTS)
    with lora.adapters_off([part.model]):
        base = trained_values([part], PROMPTS)
    true, shares = lora_merge.delta, []
    for factor in (1.0, 2.0):
        monkeypatch.setattr(lora_merge, "delta", lambda *args, by=factor: by * true(*args))
        export_hf([part], config, None, tmp_path / f"times{factor}")
        found = measure_export_error(tmp_path / f"times{factor}", PROMPTS, ours, precision, base=base)
        assert found.passed == (factor == 1.0) and found.mean < found.mean_allowed, "single tokens show nothing"
        shares.append(found.share)
    assert shares == pytest.approx([1.0, 2.0], abs=0.3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_head_with_an_adapter_gets_a_weight_of_its_own(dtype: torch.dtype, tmp_path: Path):
    part, config = adapted(tmp_path / "base", dtype, tied=True)
    assert part.unties_head
    export_hf([part], config, None, tmp_path / "out")
    assert compared(part, tmp_path / "out").passed
    stored = load_file(tmp_path / "out" / "model.safetensors")
    base = load_file(tmp_path / "base" / "model.safetensors")
    head = part.model.lm_head
    table = base["model.embed_tokens.weight"]
    assert "lm_head.weight" not in base and torch.equal(stored["model.embed_tokens.weight"], table)
    update = head.lora_B["default"].weight.double() @ head.lora_A["default"].weight.double() * 2.0  # alpha / rank
    bound = torch.finfo(dtype).eps * (table.double() + update).abs().max()
    assert (stored["lm_head.weight"].double() - table.double() - update).abs().max() <= bound
    assert update.abs().max() > 20 * bound

    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not reloaded.config.tie_word_embeddings
    del stored["lm_head.weight"]  # an export that forgets it
    save_file(stored, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    with raises(RunError, "export_mismatch", values=("lm_head.weight",)):
        compared(part, tmp_path / "out")


def test_the_last_stage_gives_the_head_that_was_tied_and_the_first_one_the_table(tmp_path: Path):
    from automodel_cli.models.checkpoint_io.weight_stream import iter_hf_weights

    part, _ = adapted(tmp_path / "base", torch.float32, tied=True)
    whole = {name: tensor for bucket in iter_hf_weights([part]) for name, tensor in bucket}
    count = part.model.config.num_hidden_layers
    anatomy = check_split(part.model)
    ends = [cut_stage(part, anatomy, layers=range(1), is_first=True, is_last=False)]
    ends += [cut_stage(part, anatomy, layers=range(1, count), is_first=False, is_last=True)]
    streams = [{name: tensor for bucket in iter_hf_weights([end]) for name, tensor in bucket} for end in ends]
    assert "lm_head.weight" not in streams[0] and "lm_head.weight" in streams[1]
    merged = streams[0] | streams[1]
    assert merged.keys() == whole.keys() and all(torch.equal(merged[name], whole[name]) for name in whole)


def test_a_tied_head_in_4_bits_is_refused(tmp_path: Path):
    build_hf("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    head = ["lm_head"]
    part = build_part(ModelConfig(pretrained=str(tmp_path), lora=LoRAConfig(target_modules=head)))
    in_4_bits = LoRAConfig(target_modules=head, quantization="nf4")
    with raises(ConfigError, "not_supported_by_model", keys=("lora.target_modules",), values=("lm_head",)):
        lora._pack_bases(part.model, dict(lora.wrappers(part.model)), in_4_bits)


def test_16_bits_of_the_trained_side_pass_beside_a_float32_export(tmp_path: Path):
    """The default precision: what rounding costs is measured, and a wrong layer costs more."""
    model = build_hf("llama")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        logits = model.bfloat16()(torch.tensor(PROMPTS)).logits[:, :-1].float().log_softmax(-1)
    ours = list(logits.gather(-1, torch.tensor(PROMPTS)[:, 1:, None])[..., 0])
    found = measure_export_error(tmp_path, PROMPTS, ours, Precision(torch.bfloat16, rounds_weights=True))
    assert found.passed and found.worst > 1e-3, "in float32 it would not pass"
    assert not measure_export_error(tmp_path, PROMPTS, ours, Precision(torch.float32, rounds_weights=False)).passed
    ours[0][3] = float("nan")
    assert not measure_export_error(tmp_path, PROMPTS, ours, Precision(torch.bfloat16, rounds_weights=True)).passed


def test_layers_are_cast_one_at_a_time_and_give_what_the_whole_cast_model_gives():
    model = build_hf("llama", tie_word_embeddings=True).bfloat16().eval()
    ids = torch.tensor(PROMPTS)
    originals = dict(model.named_parameters())
    cast_bytes = []

    def count() -> None:
        params = {id(p): p for p in model.parameters()}.values()
        cast_bytes.append(sum(4 * p.numel() for p in params if p.dtype == torch.float32))

    hooks = [layer.register_forward_hook(lambda *_: count(), prepend=True) for layer in model.model.layers]
    with torch.no_grad(), cast_layers(model, Cast(torch.float32), torch.device("cpu")):
        got = model(ids).logits
    assert cast_bytes and max(cast_bytes) <= largest_forward(model) < 4 * sum(p.numel() for p in model.parameters())
    assert all(param is originals[name] for name, param in model.named_parameters())
    for hook in hooks:
        hook.remove()
    with torch.no_grad():
        assert torch.equal(got, model.float()(ids).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_rounded_merge_keeps_the_mean_of_an_update_below_half_a_unit(dtype: torch.dtype):
    weight = torch.randn(300_000, generator=torch.Generator().manual_seed(0)).to(dtype).abs().clamp_min(0.1)
    unit = (weight.view(torch.int16) + 1).view(dtype).double() - weight.double()
    merge = (weight.double() + 0.1 * unit).float()
    kept = (lora_merge.rounded("w", merge, dtype).double() - weight.double()) / unit
    assert set(kept.tolist()) == {0.0, 1.0} and kept.mean().item() == pytest.approx(0.1, abs=5e-3)
    assert torch.equal(merge.to(dtype), weight), "to the nearest value, nothing is left of it"
    assert torch.equal(lora_merge.rounded("w", weight.float(), dtype), weight), (
        "nothing is added where nothing was trained"
    )
    assert torch.equal(lora_merge.rounded("w", merge, torch.float32), merge)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_yardstick_moves_weights_as_rounding_does(dtype: torch.dtype):
    """Within half a unit in the last place, which is the distance to the next number of the dtype, and evenly."""
    stored = torch.randn(200_000, generator=torch.Generator().manual_seed(0)).to(dtype).abs()
    stored[:100] = 0
    following = (stored.view(torch.int16) + 1).view(dtype).double()
    moved = moved_within_ulp("w", stored.float(), dtype).double() - stored.double()
    share = moved[100:] / (following - stored.double())[100:]
    assert not moved[:100].any()
    assert share.abs().max() <= 0.5 + 1e-6
    assert abs(share.mean()) < 0.01 and abs(share.std() - 12**-0.5) < 0.01  # of a uniform distribution


def test_what_does_not_fit_memory_or_time_is_left_out_with_its_reason(tmp_path: Path):
    build_hf("llama").save_pretrained(tmp_path)
    ours = [torch.zeros(len(prompt) - 1) for prompt in PROMPTS]
    exact = Precision(torch.float32, rounds_weights=False)
    with pytest.raises(Unfinished, match="host memory"):
        measure_export_error(tmp_path, PROMPTS, ours, exact, available_bytes=1000.0)
    with pytest.raises(Unfinished, match="export_check_minutes"):
        measure_export_error(tmp_path, PROMPTS, ours, exact, seconds=0.0)


@pytest.mark.parametrize("kind", ["qwen3_vl", "llava", "gemma3"])
def test_a_wrong_tower_shows_on_a_document_with_pictures_and_not_on_text(kind: str, tmp_path: Path) -> None:
    model = repository(kind, tmp_path)
    processor = FamilyProcessor(processor_of(kind), config_of(kind))
    ids_T, images = documents_of(processor)[0]
    document = PictureDocument(ids_T.tolist(), processor.placeholder, lambda: processor.keywords(ids_T[None], images))
    text = [list(range(10, 40))]
    with torch.no_grad():
        logits = [model(input_ids=torch.tensor(text)).logits[0, :-1]]
        logits.append(model(input_ids=ids_T[None], **processor.keywords(ids_T[None], images)).logits[0, :-1])
    targets = [torch.tensor(text[0])[1:], ids_T[1:]]
    ours = [x.log_softmax(-1).gather(-1, y[:, None])[:, 0] for x, y in zip(logits, targets, strict=True)]
    ours[1] = ours[1][ids_T[1:] != processor.placeholder]

    def agreement(*documents: PictureDocument) -> Agreement:
        return measure_export_error(
            tmp_path, text, ours[: 1 + len(documents)], Precision(torch.float32, False), documents=documents
        )

    assert agreement(document).worst < 1e-5
    state = load_file(tmp_path / "model.safetensors")
    (name, *_) = [key for key in state if ("visual" in key or "vision" in key) and "patch_embed" in key]
    state[name] = -state[name]
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    assert agreement().passed and not agreement(document).passed
