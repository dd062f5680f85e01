"""Sections of NeMo Automodel that change the model: freezing, quantization, fp8 and the teacher."""

from __future__ import annotations

from automodel_cli.config.importers import vision
from automodel_cli.config.importers.framework import Draft


def teacher_settings(draft: Draft) -> None:
    """The source loss is (1 - kd_ratio) x NLL + kd_ratio x KL(teacher || student) over the full vocabulary."""
    key, ratio = "teacher_model.pretrained_model_name_or_path", float(draft.get("kd_ratio", 0.5))
    if draft.get(key) is None:
        draft.decide(key, "teacher.pretrained: the model to learn from")
    else:
        draft.put("teacher.pretrained", draft.get(key), key)
    draft.put("objective.kd_weight", ratio, "kd_ratio", note="their default 0.5")
    draft.put("objective.nll_weight", round(1 - ratio, 6), "kd_ratio")
    draft.put("objective.top_k", None, note="theirs compares the whole vocabulary, ours 64 tokens and the rest as one")
    if float(draft.get("kd_loss_fn.temperature", 1.0)) != 1.0:
        draft.decide("kd_loss_fn.temperature", "ours compares the distributions at temperature 1")


def freeze_settings(draft: Draft) -> None:
    """Their `apply_parameter_freezing`: embeddings by the class of the module, towers and language model by name."""
    prefix = "freeze_config."
    if draft.get(prefix + "freeze_embeddings"):
        draft.put("train.freeze", ["*embed*"], prefix + "freeze_embeddings")
    if draft.reads_pictures:
        on = draft.has(prefix)
        tower, text = prefix + "freeze_vision_tower", prefix + "freeze_language_model"
        frozen = {"tower": (tower, bool(draft.get(tower, on))), "text": (text, bool(draft.get(text, False)))}
        vision.put_parts(draft, frozen)
        draft.decide("dataset._target_", "their code makes chats of the rows; ours have messages and images")
    elif draft.get(prefix + "freeze_language_model"):
        draft.decide(prefix + "freeze_language_model", "a text recipe trains the language model: train.freeze")


def quantization_settings(draft: Draft) -> None:
    prefix = "quantization."
    if draft.get(prefix + "load_in_8bit"):
        draft.decide(prefix + "load_in_8bit", "no 8-bit base: model.lora.quantization is none or nf4")
    if not draft.get(prefix + "load_in_4bit"):
        return
    if not draft.has("peft."):
        draft.decide(prefix + "load_in_4bit", "a base of 4 bits is for adapters: model.lora")
        return
    kind = prefix + "bnb_4bit_quant_type"
    if draft.get(kind, "nf4") != "nf4":
        draft.decide(kind, "the base of adapters is none or nf4, here nf4")
    draft.put("model.lora.quantization", "nf4", prefix + "load_in_4bit", kind)


def fp8_settings(draft: Draft) -> None:
    """The source names layers by parts of their names, this package by suffixes. Both skip dims not divisible by 16."""
    keys = [key for key in draft.source if key.startswith("fp8.")]
    if not keys or not draft.get("fp8.enabled", True):
        for key in keys:
            draft.leave(key, "model.fp8 is left null: fp8.enabled is false")
        return
    note = "" if draft.get("fp8.recipe_name") else "their default"
    draft.put("model.fp8.recipe", draft.get("fp8.recipe_name", "tensorwise"), "fp8.recipe_name", note=note)
    draft.put("model.fp8.emulate", bool(draft.get("fp8.emulate", False)), "fp8.emulate", "fp8.enabled")
    never = ("lm_head", "embed_tokens")
    skipped = [name for name in draft.get("fp8.filter_fqns", []) if str(name).strip(".") not in never]
    if skipped:
        note = "ours are endings of names; the head is never converted"
        draft.put("model.fp8.exclude_modules", [str(name).strip(".") for name in skipped], "fp8.filter_fqns", note=note)
    else:
        draft.leave("fp8.filter_fqns", "never converted: model.fp8 is for the linear layers of decoder layers")
    if draft.get("compile.enabled"):
        note = "with 8-bit products ours compiles what is between products, casts among it"
        draft.put("parallelizer.enable_compile", "auto", "compile.enabled", note=note)
