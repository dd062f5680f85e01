"""Adapters on a vision-language model: on its text model, its tower and its projector.

Names of layers are those of the composite, as for `peft` on the composite. Only parts that the config trains by
adapters can be chosen, because towers have layers with the names of text layers (`q_proj`).
"""

from __future__ import annotations

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.typed_torch import set_attributes
from automodel_cli.models.lora import adapters as lora
from automodel_cli.models.lora import experts as expert_lora
from automodel_cli.models.lora import fused as lora_fused
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.model_part import ModelPart
from automodel_cli.models.vision.config import VisionConfig
from automodel_cli.models.vision.front import Front, replace_module


def inject(part: ModelPart, config: LoRAConfig, vision: VisionConfig) -> None:
    """Wrap the target layers of the parts with adapters in place, and freeze everything else.

    Raises ConfigError for targets that match no layer, and for a part with adapters in which nothing is trained.
    """
    front, model = part.front, part.model
    assert front is not None, "the front end is added before"
    chosen = {name for name in ("tower", "projector") if getattr(vision, name) == "adapters"}
    chosen |= {"text"} if vision.text == "trained" else set()
    outside = {name for name, _ in front.composite.named_modules() if _part_of(front, f"{name}.") in chosen}
    head = model.get_output_embeddings()
    head_name = next(name for name, module in model.named_modules() if module is head)
    with front.completed(model.base_model, head) as composite:
        of_text = {name for name, _ in composite.named_modules() if _is_text(front, f"{name}.") and "text" in chosen}
        lora.inject(composite, config, only=outside | of_text)
        if chosen != {"text"} and expert_lora.adapted(composite):
            raise ConfigError(
                "adapters on experts are not supported beside adapters on tower or projector, because their gradients "
                "have not been compared with peft",
                code="unsupported_combination",
                keys=("model.vision", "model.lora.target_parameters"),
                fix="model.vision.tower=frozen model.vision.projector=frozen",
            )
        lora_fused.fuse_adapters(composite)
        replace_module(model, head_name, composite.get_submodule(front.head_name))
        set_attributes(model, peft_config=composite.peft_config)
        trained = {_part_of(front, name) for name, param in composite.named_parameters() if param.requires_grad}
    for name in sorted(chosen - trained):
        raise ConfigError(
            f"model.vision.{name}={getattr(vision, name)} with model.lora, but lora.target_modules="
            f"{config.target_modules!r} matches no layer of it",
            code="nothing_to_train",
            keys=(f"model.vision.{name}", "model.lora.target_modules"),
            fix=f"model.vision.{name}=frozen",
        )


def _part_of(front: Front, name: str) -> str:
    """Return the part of a parameter, or of a module whose name ends with a dot. Empty for modules around the text."""
    if _is_text(front, name):
        return "text"
    if f"{front.text_name}.".startswith(name) or name == ".":
        return ""
    return "tower" if front.is_tower(name) else "projector"


def _is_text(front: Front, name: str) -> bool:
    return name.startswith((f"{front.text_name}.", f"{front.head_name}."))
