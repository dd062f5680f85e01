"""Low-rank adapters through `peft`: injected in place, filled, taken out and switched off."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.adapter_layers import is_adapter
from automodel_cli.distributed.expert_parallel import low_rank
from automodel_cli.distributed.typed_torch import modules_of, set_attributes
from automodel_cli.models.lora import dora as lora_dora
from automodel_cli.models.lora import experts as expert_lora
from automodel_cli.models.lora import init as lora_init
from automodel_cli.models.lora import options as lora_options
from automodel_cli.models.lora import pretrained as lora_pretrained
from automodel_cli.models.lora import targets as lora_targets
from automodel_cli.models.lora import tokens as lora_tokens
from automodel_cli.models.lora.layer import ADAPTER, AdapterLayer
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.precision import nf4

if TYPE_CHECKING:
    import peft
    from transformers import PreTrainedModel


def inject(
    model: PreTrainedModel, config: LoRAConfig, new_rows: Sequence[int] = (), *, only: Collection[str] | None = None
) -> None:
    """Wrap the target layers in place and freeze everything else. Works on the meta device.

    Args:
        new_rows: rows of the embedding and the head that belong to new tokens, which are trained.
        only: names of the modules that the config can choose. None: all.
    """
    _need("model.lora", "peft", key="lora", fix="pip install 'automodel-cli[peft]'")
    if config.quantization == "nf4":
        fix = "pip install bitsandbytes, or model.lora.quantization=none"
        _need("lora.quantization=nf4 (QLoRA)", "bitsandbytes", key="lora.quantization", fix=fix)
    if isinstance(config.target_modules, list):
        lora_targets.check_targets(model, config.target_modules, only)
    settings = _settings(model, config)
    saved, settings.modules_to_save = settings.modules_to_save or [], None  # trained in place, without peft's copies
    if only is not None:
        settings.target_modules = lora_targets.selected(only, settings)
        if not settings.target_modules and config.target_modules:
            raise _unsupported_target(model, config, "it matches no layer", no_match=True)
    rows, settings.trainable_token_indices = _rows_of(settings, [*config.trainable_token_indices, *new_rows]), None
    experts, settings.target_parameters = config.target_parameters or settings.target_parameters, None
    _wrap_layers(model, settings, config)
    adapted = [name for name, _ in wrappers(model)]
    expert_lora.inject(model, experts, settings)
    lora_options.check_patterns(config, [*adapted, *expert_lora.weights(model)])
    adapted += [name for name, _ in expert_lora.adapted(model)]
    lora_options.train_saved_modules(model, saved, adapted, only)
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


def _wrap_layers(model: PreTrainedModel, settings: peft.LoraConfig, config: LoRAConfig) -> None:
    """Add the adapters of `peft` to linear layers and embeddings, and freeze everything else."""
    import peft

    if not settings.target_modules:  # adapters on experts only
        model.requires_grad_(False)
        set_attributes(model, peft_config={ADAPTER: settings})
        return
    dead, shared = lora_targets.bypassed(model, always=True), lora_targets.shared(model)
    try:
        with warnings.catch_warnings():  # a tied head gets a separate weight on export (`untied_weights`)
            warnings.filterwarnings("ignore", message=".*tie_word_embeddings.*")
            warnings.filterwarnings("ignore", message=".*_pattern keys did not match.*")  # `check_patterns` raises
            peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
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


def _rows_of(settings: peft.LoraConfig, own: list[int]) -> list[int]:
    """Return the rows that an adapter on disk trains, or `own` for new adapters."""
    stored = settings.trainable_token_indices
    of_tables = list(stored.values()) if isinstance(stored, dict) else [stored or []]
    return own or [row for rows in of_tables for row in rows]


def _train_rows(model: PreTrainedModel, rows: list[int]) -> None:
    found = lora_tokens.add_rows(model, rows)
    peft_config(model).trainable_token_indices = found or None


def _is_of_adapter(name: str) -> bool:
    return ".lora_" in name or name.endswith((".trainable_tokens_delta", *low_rank.ADAPTERS))


def _settings(model: PreTrainedModel, config: LoRAConfig) -> peft.LoraConfig:
    """Return the `peft.LoraConfig` of new adapters, or of those on disk."""
    if config.pretrained is not None:
        settings = lora_pretrained.read_peft_config(config.pretrained)
        settings.lora_dropout = config.dropout
        return settings
    settings = _peft_config(model, config)
    lora_options.check_layers(config, model.config.get_text_config().num_hidden_layers)
    if config.exclude_modules:
        targets = cast(Collection[str], settings.target_modules)  # "all-linear" is a list by now
        names = [name for name, _ in model.named_modules() if lora_options.ends_in_any(name, targets)]
        lora_options.check_excluded(config, names)
    return settings


def untied_weights(model: nn.Module) -> dict[str, Tensor]:
    """Return the weight of a tied head by its hub name, if an adapter changes the embedding or the head."""
    adapted = {f"{name}.base_layer.weight" for name, _ in low_rank_layers(model)}
    owners: dict[int, list[str]] = {}
    params = dict(model.named_parameters(remove_duplicate=False))
    for name, param in params.items():
        owners.setdefault(id(param), []).append(name)
    shared = (names for names in owners.values() if not adapted.isdisjoint(names))
    return {name.replace(".base_layer.", "."): params[name] for names in shared for name in names[1:]}


def _pack_bases(model: PreTrainedModel, layers: dict[str, AdapterLayer], config: LoRAConfig) -> None:
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


def _unsupported_target(
    model: PreTrainedModel, config: LoRAConfig, reason: str, *, no_match: bool = False
) -> ConfigError:
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


def _peft_config(model: PreTrainedModel, config: LoRAConfig) -> peft.LoraConfig:
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
        fan_in_fan_out=any(True for _ in modules_of(model, Conv1D)),
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


def wrappers(model: nn.Module) -> list[tuple[str, AdapterLayer]]:
    """(name, adapter layer) of every wrapped layer. Empty without adapters, and then peft is never imported."""
    return [(name, module) for name, module in model.named_modules() if is_adapter(module)]


def low_rank_layers(model: nn.Module) -> list[tuple[str, AdapterLayer]]:
    """Return name and layer of the wrapped layers with A and B, without those with trained rows only."""
    return [(name, layer) for name, layer in wrappers(model) if not isinstance(layer, lora_tokens.TokenRows)]


def matrices_of(name: str, layer: AdapterLayer) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the trained parameters of a wrapped layer, with their names in files of peft."""
    if isinstance(layer, lora_tokens.TokenRows):
        if not layer.is_tied:
            yield lora_tokens.file_name(name), layer.trainable_tokens_delta
        return
    if lora_targets.is_embedding(layer):
        for matrix in ("lora_embedding_A", "lora_embedding_B"):
            yield f"{name}.{matrix}", getattr(layer, matrix)[ADAPTER]
        return
    for matrix in ("lora_A", "lora_B"):
        yield f"{name}.{matrix}.weight", getattr(layer, matrix)[ADAPTER].weight
    if lora_dora.has_magnitude(layer):
        yield f"{name}.lora_magnitude_vector", lora_dora.magnitude(layer)


def has_adapters(model: nn.Module) -> bool:
    """Return whether the complete model of a pipeline stage has adapters. The stage itself may have none."""
    return hasattr(model, "peft_config")


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
    of_layers = [layer.scaling for model in models for _, layer in wrappers(model)]
    of_experts = [expert_lora.scaling(experts) for model in models for _, experts in expert_lora.adapted(model)]
    scales = [(scaling, scaling[ADAPTER]) for scaling in (*of_layers, *of_experts)]
    for scaling, _ in scales:
        scaling[ADAPTER] = 0.0
    try:
        yield
    finally:
        for scaling, value in scales:
            scaling[ADAPTER] = value


@torch.no_grad()
def init_adapters(model: nn.Module, config: LoRAConfig | None, seed: int) -> None:
    """Fill new adapters. The step-0 model is the base, under any layout."""
    for _, rows in modules_of(model, lora_tokens.TokenRows):
        lora_tokens.start(rows)
    lora_init.start(dict(low_rank_layers(model)), config, seed)
    expert_lora.init_adapters(model, seed)


def fill_pretrained(model: nn.Module, name: str, in_whole: Callable[[str], str] = str) -> None:
    """Read the adapters of this rank, and the modules trained with them, from an adapter of peft.

    `in_whole` returns the name in the composite of the adapter.
    """
    modules = peft_config(model).modules_to_save or []
    matrices = {file_name: param for at, layer in wrappers(model) for file_name, param in matrices_of(at, layer)}
    experts = dict(expert_lora.parameters_in_files(model))
    targets = matrices | experts | dict(lora_options.saved_parameters(model, modules))
    named = {in_whole(file_name): param for file_name, param in targets.items()}
    lora_pretrained.fill(name, named, {in_whole(file_name) for file_name in experts})


def peft_config(model: nn.Module) -> peft.LoraConfig:
    """Return the configuration of the adapters of the complete model, before it was split into stages."""
    return cast("dict[str, peft.LoraConfig]", model.peft_config)[ADAPTER]
