"""Low-rank adapters through `peft`: injected in place, saved in its file format, merged for export.

A merge is `W + scale * B @ A`, with rescaled rows in DoRA, and needs no code of the adapter library.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.expert_parallel import low_rank
from automodel_cli.models import (
    expert_lora,
    lora_dora,
    lora_init,
    lora_options,
    lora_pretrained,
    lora_targets,
    lora_tokens,
    nf4,
    transformers_compat,
)
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.stochastic_rounding import round_stochastically

if TYPE_CHECKING:
    from automodel_cli.models.model_part import ModelPart

_ADAPTER = "default"  # peft's own name for the only adapter


def inject(model: nn.Module, config: LoRAConfig, new_rows: Sequence[int] = ()) -> None:
    """Wrap the target layers in place and freeze everything else. Works on the meta device.

    `new_rows`: rows of the embedding and the head that belong to new tokens, which are trained.
    """
    _need("model.lora", "peft", key="lora", fix="pip install 'automodel-cli[peft]'")
    if config.quantization == "nf4":
        fix = "pip install bitsandbytes, or model.lora.quantization=none"
        _need("lora.quantization=nf4 (QLoRA)", "bitsandbytes", key="lora.quantization", fix=fix)
    if isinstance(config.target_modules, list):
        lora_targets.check_targets(model, config.target_modules)
    settings = _settings(model, config)
    rows, settings.trainable_token_indices = _rows_of(settings, [*config.trainable_token_indices, *new_rows]), None
    saved, settings.modules_to_save = settings.modules_to_save or [], None  # trained in place, without peft's copies
    experts, settings.target_parameters = config.target_parameters or settings.target_parameters, None
    _wrap_layers(model, settings, config)
    adapted = [name for name, _ in wrappers(model)]
    expert_lora.inject(model, experts, settings)
    lora_options.check_patterns(config, [*adapted, *expert_lora.weights(model)])
    lora_options.train_saved_modules(model, saved, [*adapted, *(name for name, _ in expert_lora.adapted(model))])
    settings.modules_to_save = saved or None  # of the file
    layers = dict(wrappers(model))
    _train_rows(model, rows)
    if config.pretrained is not None:
        trained = [name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad]
        matrices = [file_name for name, layer in wrappers(model) for file_name, _ in matrices_of(name, layer)]
        matrices += [file_name for file_name, _ in expert_lora.parameters_in_files(model)]
        lora_pretrained.check_matrices(config.pretrained, [*matrices, *(n for n in trained if not _is_of_adapter(n))])
    if config.quantization == "nf4":
        _pack_bases(model, layers, config)
    lora_init.add_initial(layers, config)
    lora_dora.use_own_forward(model)


def _wrap_layers(model: nn.Module, settings: Any, config: LoRAConfig) -> None:
    """Add the adapters of `peft` to linear layers and embeddings, and freeze everything else."""
    import peft

    if not settings.target_modules:  # adapters on experts only
        model.requires_grad_(False)
        cast(Any, model).peft_config = {_ADAPTER: settings}
        return
    dead, shared = lora_targets.bypassed(model, always=True), lora_targets.shared(model)
    try:
        with warnings.catch_warnings():  # a tied head gets a separate weight on export (`untied_weights`)
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            warnings.filterwarnings("ignore", message=".*_pattern keys did not match.*")  # `check_patterns` raises
            peft.inject_adapter_in_model(settings, model, adapter_name=_ADAPTER)
    except ValueError as error:
        raise _unsupported_target(model, config, str(error), no_match=True) from error
    for name, wrapper in wrappers(model):
        is_embedding = lora_targets.is_embedding(wrapper)
        if not is_embedding and not lora_targets.is_linear(wrapper.get_base_layer()):
            raise _unsupported_target(model, config, f"it matches {name}, which is not a linear layer or an embedding")
        if is_embedding and (config.use_dora or config.dropout):
            option = "use_dora" if config.use_dora else "dropout"
            raise _unsupported_target(model, config, f"it matches the embedding {name}, which has no {option}")
        if name in dead:
            raise _unsupported_target(
                model, config, f"it matches {name}, whose weight the model reads without calling the layer"
            )
        if name in shared:
            raise _unsupported_target(model, config, f"it matches {name}, which shares its weight with another layer")


def _rows_of(settings: Any, own: list[int]) -> list[int]:
    """Return the rows that an adapter on disk trains, or `own` for new adapters."""
    stored = settings.trainable_token_indices
    of_tables = list(stored.values()) if isinstance(stored, dict) else [stored or []]
    return own or [row for rows in of_tables for row in rows]


def _train_rows(model: nn.Module, rows: list[int]) -> None:
    found = lora_tokens.add_rows(model, rows)
    cast(Any, model).peft_config[_ADAPTER].trainable_token_indices = found or None


def _is_of_adapter(name: str) -> bool:
    return ".lora_" in name or name.endswith((".trainable_tokens_delta", *low_rank.ADAPTERS))


def _settings(model: nn.Module, config: LoRAConfig) -> Any:
    """Return the `peft.LoraConfig` of new adapters, or of those on disk."""
    if config.pretrained is not None:
        settings = lora_pretrained.read_peft_config(config.pretrained)
        settings.lora_dropout = config.dropout
        return settings
    settings = _peft_config(model, config)
    lora_options.check_layers(config, cast(Any, model).config.get_text_config().num_hidden_layers)
    if config.exclude_modules:
        targets = settings.target_modules
        names = [name for name, _ in model.named_modules() if lora_options.ends_in_any(name, targets)]
        lora_options.check_excluded(config, names)
    return settings


def untied_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weight of a tied head by its hub name, if an adapter changes the embedding or the head."""
    layers = [(name, layer) for name, layer in wrappers(model) if not isinstance(layer, lora_tokens.TokenRows)]
    adapted = {f"{name}.base_layer.weight" for name, _ in layers}
    owners: dict[int, list[str]] = {}
    params = dict(model.named_parameters(remove_duplicate=False))
    for name, param in params.items():
        owners.setdefault(id(param), []).append(name)
    shared = (names for names in owners.values() if not adapted.isdisjoint(names))
    return {name.replace(".base_layer.", "."): params[name] for names in shared for name in names[1:]}


def _pack_bases(model: nn.Module, layers: dict[str, Any], config: LoRAConfig) -> None:
    tied = untied_weights(model)
    for name, wrapper in layers.items():
        if lora_targets.is_embedding(wrapper):
            continue  # a lookup, which reads few rows
        if f"{name}.weight" in tied:
            reason = f"it matches {name}, which is tied to the embedding and therefore cannot be stored in 4 bits"
            raise _unsupported_target(model, config, reason)
        base = wrapper.get_base_layer()
        if not isinstance(base, nn.Linear):
            raise ConfigError(
                f"lora.quantization=nf4 is not supported because {name} is a {type(base).__name__}, not a Linear",
                code="not_supported_by_model",
                keys=("lora.quantization",),
                fix="model.lora.quantization=none",
            )
        wrapper.base_layer = nf4.NF4Linear(base)


def _unsupported_target(model: nn.Module, config: LoRAConfig, reason: str, *, no_match: bool = False) -> ConfigError:
    with bare(model):  # some layers may be wrapped already
        names = lora_targets.all_linear(model)
    every = config.target_modules == "all-linear"
    fix = f"model.lora.target_modules=[{','.join(names)}]" if every else "model.lora.target_modules=all-linear"
    return ConfigError(
        f"lora.target_modules={config.target_modules!r} is not supported because {reason}",
        code="unknown_name" if no_match else "not_supported_by_model",
        keys=("lora.target_modules",),
        fix=fix if names else "model.lora=null",
    )


def _peft_config(model: nn.Module, config: LoRAConfig) -> Any:
    """For a model without adapters yet. "all-linear" becomes a list of name endings, so that a saved adapter means the
    same whatever reads it."""
    import peft
    from transformers.pytorch_utils import Conv1D

    every = config.target_modules == "all-linear"
    return peft.LoraConfig(
        r=config.rank,
        lora_alpha=cast(int, config.alpha),  # peft computes with it, integer or not
        lora_dropout=config.dropout,
        target_modules=lora_targets.all_linear(model) if every else config.target_modules,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        task_type="CAUSAL_LM",
        modules_to_save=config.modules_to_save or None,
        **lora_options.peft_options(config),
    )


def _need(what: str, package: str, *, key: str, fix: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{what} requires the package {package}, which is not installed",
            code="missing_package",
            keys=(key,),
            fix=fix,
        )


def wrappers(model: nn.Module) -> list[tuple[str, Any]]:
    """(name, adapter layer) of every wrapped layer. Empty without adapters, and then peft is never imported."""
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")]


def matrices_of(name: str, layer: object) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the trained parameters of a wrapped layer, with their names in files of peft."""
    if isinstance(layer, lora_tokens.TokenRows):
        if not layer.is_tied:
            yield lora_tokens.file_name(name), layer.trainable_tokens_delta
        return
    if lora_targets.is_embedding(layer):
        for matrix in ("lora_embedding_A", "lora_embedding_B"):
            yield f"{name}.{matrix}", getattr(layer, matrix)[_ADAPTER]
        return
    for matrix in ("lora_A", "lora_B"):
        yield f"{name}.{matrix}.weight", getattr(layer, matrix)[_ADAPTER].weight
    if lora_dora.has_magnitude(layer):
        yield f"{name}.lora_magnitude_vector", lora_dora.magnitude(layer)


def has_adapters(model: nn.Module) -> bool:
    """Return whether a layer or an experts module has adapters."""
    return bool(wrappers(model) or expert_lora.adapted(model))


@contextmanager
def bare(model: nn.Module) -> Iterator[None]:
    """Inside, wrapped layers are replaced by their base layers: names and structure are the hub's."""
    wrapped = [
        (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], m) for name, m in wrappers(model)
    ]
    for parent, leaf, wrapper in wrapped:
        parent._modules[leaf] = wrapper.get_base_layer()
    of_experts = expert_lora.take_out(model)
    try:
        yield
    finally:
        expert_lora.put_back(of_experts)
        for parent, leaf, wrapper in wrapped:
            parent._modules[leaf] = wrapper


@contextmanager
def adapters_off(models: Sequence[nn.Module]) -> Iterator[None]:
    """Context in which the models compute their base output: updates are scaled by 0. Works under any sharding, for
    frozen and trained layers. The switch of `peft` would also change which parameters are trained.
    """
    scales = [(layer.scaling, layer.scaling[_ADAPTER]) for model in models for _, layer in wrappers(model)]
    scales += [
        (experts.lora_scaling, experts.lora_scaling[_ADAPTER])
        for model in models
        for _, experts in expert_lora.adapted(model)
    ]
    for scaling, _ in scales:
        scaling[_ADAPTER] = 0.0
    try:
        yield
    finally:
        for scaling, value in scales:
            scaling[_ADAPTER] = value


@torch.no_grad()
def init_adapters(model: nn.Module, config: LoRAConfig | None, seed: int) -> None:
    """Fill new adapters. The step-0 model is the base, under any layout."""
    layers = dict(wrappers(model))
    for rows in (layer for layer in layers.values() if isinstance(layer, lora_tokens.TokenRows)):
        lora_tokens.start(rows)
    lora_init.start({n: of for n, of in layers.items() if not isinstance(of, lora_tokens.TokenRows)}, config, seed)
    expert_lora.init_adapters(model, seed)


def fill_pretrained(part: ModelPart, name: str) -> None:
    """Read the adapters of this rank, and the modules trained with them, from an adapter of peft."""
    modules = _settings_of(part).modules_to_save or []
    matrices = {file_name: param for at, layer in wrappers(part.model) for file_name, param in matrices_of(at, layer)}
    experts = dict(expert_lora.parameters_in_files(part.model))
    lora_pretrained.fill(name, matrices | experts | dict(lora_options.saved_parameters(part, modules)), experts)


def _settings_of(part: ModelPart) -> Any:
    """Return the `peft.LoraConfig` of the complete model, before it was split into stages."""
    return cast(Any, part.model).peft_config[_ADAPTER]


def scale(layer: Any) -> float:
    """Return the scale of B @ A in a wrapped layer."""
    factor: float = layer.scaling[_ADAPTER]
    return factor


def delta(layer: object) -> Tensor:
    """Return the full fp32 update of a wrapped layer. Collective if adapters are sharded."""
    a, b = lora_init.joined(layer)
    # (O, R) x (R, I) -> (O, I).
    update = (b.float() @ a.float()) * scale(layer)
    return update.T if lora_targets.is_transposed(layer) else update


def merged_weight(weight: Tensor, layer: Any) -> Tensor:
    """Return a layer's full `weight` with its adapter, in fp32. Collective if adapters are sharded."""
    if isinstance(layer, lora_tokens.TokenRows):
        return lora_tokens.merged(weight, layer)
    # In float32, rounded once by the caller. A sum in bfloat16 would round the update to the weight's last place.
    merged = weight.float() + delta(layer)
    return lora_dora.rescaled(merged, layer) if lora_dora.has_magnitude(layer) else merged


def rounded(name: str, merge: Tensor, dtype: torch.dtype) -> Tensor:
    """A trained weight or a merge in `dtype`, up or down at random in 16 bits, so that its mean stays.

    An update is often below half a unit in the last place of its weight. Rounding to the nearest value drops it: half
    of the training in a short bfloat16 run. The random numbers depend on `name` only.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return merge.to(dtype)
    return round_stochastically(f"{name} merged", merge, dtype)


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

    local = {}
    for part in parts:
        for name, layer in wrappers(part.model):
            for file_name, param in matrices_of(name, layer):
                local[file_name] = transformers_compat.full_tensor(param).cpu().contiguous()
            if config.starts_at_weights and layer.lora_A and lora_init.has_initial(layer):
                for matrix, full in zip(("lora_A", "lora_B"), lora_init.joined(layer), strict=True):
                    local[f"{name}.{matrix}.weight"] = full.cpu().contiguous()
        local |= {name: weight.cpu().contiguous() for name, weight in expert_lora.in_files(part.model)}
        for name, param in lora_options.saved_parameters(part, _settings_of(part).modules_to_save or []):
            local[name] = transformers_compat.full_tensor(param.detach()).cpu().contiguous().clone()
    of_stages: list[dict[str, Tensor]] = [local]
    if pp_group is not None:
        of_stages = [{} for _ in range(dist.get_world_size(pp_group))]
        dist.all_gather_object(of_stages, local, group=pp_group)
    if not write:
        return
    within = parts[0].within
    places = {} if within is None else within.modules
    state = {_in_whole(name, places): weight for stage in of_stages for name, weight in stage.items()}
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    hub_names = {f"base_model.model.{name}": weight for name, weight in state.items()}
    save_file(hub_names, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    peft_config = copy.deepcopy(_settings_of(parts[0]))
    if places:  # other parts of a composite have layers with the same names
        experts = {name.partition(".base_layer.lora_")[0] for name in state if ".base_layer.lora_" in name}
        layers = {
            name.partition(".lora_")[0].removesuffix(".base_layer") for name in state if ".lora_" in name
        } - experts
        peft_config.target_modules = layers
        peft_config.target_parameters = expert_lora.full_names(experts) or None
        peft_config.exclude_modules = peft_config.layers_to_transform = None
    elif entries := peft_config.modules_to_save:  # peft compares letters: `norm` would match `q_norm` too
        peft_config.modules_to_save = lora_options.saved_modules(state, entries)
    if config.starts_at_weights:
        lora_init.convert(peft_config)
    peft_config.base_model_name_or_path = base_model
    peft_config.inference_mode = True
    peft_config.save_pretrained(folder)
