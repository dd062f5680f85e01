"""Low-rank adapters through `peft`: injected in place, saved in its file format, merged for export.

Only linear layers of plain LoRA are used, so a merge is `W + scale * B @ A` and needs no code of the adapter library.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.models import compat, nf4
from automodel_cli.models.config import LoRAConfig
from automodel_cli.models.seeds import generator_for

if TYPE_CHECKING:
    from automodel_cli.models.part import ModelPart

_ADAPTER = "default"  # peft's own name for the only adapter
# In families with fused experts peft reads these names as "the experts' fused parameters", in a config as in a saved
# file.
_EXPERT_NAMES = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


def inject(model: nn.Module, config: LoRAConfig) -> None:
    """Wrap the target layers in place and freeze everything else. Works on the meta device."""
    _need("model.lora", "peft", key="lora", fix="pip install 'automodel-cli[peft]'")
    if config.base_quantization == "nf4":
        fix = "pip install bitsandbytes, or model.lora.base_quantization=none"
        _need("lora.base_quantization=nf4 (QLoRA)", "bitsandbytes", key="lora.base_quantization", fix=fix)
    import peft

    try:
        peft.inject_adapter_in_model(_peft_config(model, config), model, adapter_name=_ADAPTER)
    except ValueError as error:
        linear = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise ConfigError(
            f"lora.target_modules={config.target_modules!r} fits no layer: {error}",
            keys=("lora.target_modules",),
            fix=f"model.lora.target_modules=all-linear, or some of {linear}",
        ) from error
    unsupported = [n for n, m in wrappers(model) if not isinstance(m.get_base_layer(), nn.Linear)]
    if unsupported:
        raise ConfigError(
            f"lora.target_modules reaches {unsupported[0]}, which is not a linear layer",
            keys=("lora.target_modules",),
            fix="model.lora.target_modules=all-linear",
        )
    if config.base_quantization == "nf4":
        for _, wrapper in wrappers(model):
            wrapper.base_layer = nf4.NF4Linear(wrapper.get_base_layer())


def _targets(model: nn.Module, config: LoRAConfig) -> str | list[str]:
    """ "all-linear" as a list of name endings, so that a saved adapter means the same whatever reads it."""
    if config.target_modules != "all-linear":
        return config.target_modules
    head = model.get_output_embeddings()  # type: ignore[operator]
    linear = {n.rpartition(".")[2] for n, m in model.named_modules() if _is_linear(m) and m is not head}
    linear -= {n.rpartition(".")[2] for n, m in model.named_modules() if m is head}
    linear -= {"base_layer", _ADAPTER}
    wrapped = {n.rpartition(".")[2] for n, _ in wrappers(model)}
    fused_experts = any(hasattr(m, "num_experts") and hasattr(m, "has_gate") for m in model.modules())
    return sorted((linear | wrapped) - (_EXPERT_NAMES if fused_experts else set()))


def _is_linear(module: nn.Module) -> bool:
    """Not a family's own kind of linear layer (grouped outputs): it computes otherwise than an adapter's products."""
    return isinstance(module, nn.Linear) and not type(module).__module__.startswith("transformers.models.")


def _peft_config(model: nn.Module, config: LoRAConfig) -> Any:
    import peft

    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft computes with it, integer or not
        lora_dropout=config.dropout,
        target_modules=_targets(model, config),
        use_rslora=config.use_rslora,
        task_type="CAUSAL_LM",
    )


def _need(what: str, package: str, *, key: str, fix: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{what} needs the package {package}, which is not installed", keys=(key,), fix=fix)


def wrappers(model: nn.Module) -> list[tuple[str, Any]]:
    """(name, adapter layer) of every wrapped layer. Empty without adapters, and then peft is never imported."""
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")]


@contextmanager
def bare(model: nn.Module) -> Iterator[None]:
    """Inside, wrapped layers are replaced by their base layers: names and structure are the hub's."""
    found = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], m) for name, m in wrappers(model)]
    for parent, leaf, wrapper in found:
        parent._modules[leaf] = wrapper.get_base_layer()
    try:
        yield
    finally:
        for parent, leaf, wrapper in found:
            parent._modules[leaf] = wrapper


@contextmanager
def adapters_off(models: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, the models compute what their base does: updates are scaled by 0. Under any sharding, and for layers that
    are frozen or trained; the adapter library's own switch would also change what is trained.
    """
    scales = [(layer.scaling, layer.scaling[_ADAPTER]) for model in models for _, layer in wrappers(model)]
    for scaling, _ in scales:
        scaling[_ADAPTER] = 0.0
    try:
        yield
    finally:
        for scaling, value in scales:
            scaling[_ADAPTER] = value


@torch.no_grad()
def init_adapters(model: nn.Module, seed: int) -> None:
    """A is uniform as in a linear layer's default, B is zero: the step-0 model is the base, under any layout."""
    for name, layer in wrappers(model):
        a, b = layer.lora_A[_ADAPTER].weight, layer.lora_B[_ADAPTER].weight
        whole = torch.empty(a.shape, dtype=torch.float32)
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5), generator=generator_for(seed, f"{name}.lora_A"))
        compat.local(a).copy_(compat.local_part(a, whole))
        compat.local(b).zero_()


def scale(layer: Any) -> float:
    """What multiplies B @ A in a wrapped layer."""
    factor: float = layer.scaling[_ADAPTER]
    return factor


def delta(layer: Any, factor: float | None = None) -> Tensor:
    """The full fp32 update of a wrapped layer, by its own scale or `factor`. Collective where adapters are sharded."""
    a, b = (
        compat.gathered(layer.lora_A[_ADAPTER].weight).float(),
        compat.gathered(layer.lora_B[_ADAPTER].weight).float(),
    )
    return (b @ a) * (scale(layer) if factor is None else factor)


def merged(weight: Tensor, layer: Any, factor: float | None = None) -> Tensor:
    """A layer's full `weight` with its `delta` added in fp32, in the dtype of the weight."""
    return (weight.float() + delta(layer, factor)).to(weight.dtype)


def _in_whole(name: str, places: dict[str, str]) -> str:
    """A name of the language model as the composite around it has it."""
    for of_text, of_whole in places.items():
        if name.startswith(f"{of_text}."):
            return of_whole + name.removeprefix(of_text)
    return name


def save_adapters(
    parts: Sequence[ModelPart],
    config: LoRAConfig,
    directory: str | Path,
    *,
    base_model: str,
    write: bool,
    pp_group: dist.ProcessGroup | None = None,
) -> None:
    """`adapter_config.json` + `adapter_model.safetensors`, as `peft.PeftModel.from_pretrained` reads them.

    Collective; only the rank with `write` touches the disk. `pp_group` are the ranks that hold the other stages.
    """
    from safetensors.torch import save_file

    mine = {}
    for part in parts:
        for name, layer in wrappers(part.model):
            for matrix in ("lora_A", "lora_B"):
                weight = compat.gathered(getattr(layer, matrix)[_ADAPTER].weight)
                mine[f"{name}.{matrix}.weight"] = weight.cpu().contiguous()
    of_stages: list[dict[str, Tensor]] = [mine]
    if pp_group is not None:
        of_stages = [{} for _ in range(dist.get_world_size(pp_group))]
        dist.all_gather_object(of_stages, mine, group=pp_group)
    if not write:
        return
    within = parts[0].within
    places = {} if within is None else within.modules
    state = {_in_whole(name, places): weight for stage in of_stages for name, weight in stage.items()}
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    hub_names = {f"base_model.model.{name}": weight for name, weight in state.items()}
    save_file(hub_names, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    peft_config = _peft_config(parts[0].model, config)
    if places:  # the other parts of a composite have layers of the same names
        peft_config.target_modules = {name.partition(".lora_")[0] for name in state}
    peft_config.base_model_name_or_path = base_model
    peft_config.inference_mode = True
    peft_config.save_pretrained(folder)
