"""Model of a run on this rank: build it, split it into stages, parallelize it and load weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import Batch, one_document
from automodel_cli.data.head_output import HeadOutput, HeadRequest
from automodel_cli.distributed import empty_groups
from automodel_cli.distributed.expert_parallel.apply import experts_modules
from automodel_cli.distributed.fusion import compiled_regions
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.distributed.sharded_module import weights_changed
from automodel_cli.models import transformers_compat
from automodel_cli.models.attention import flash_support, kernel_selection
from automodel_cli.models.attention.packed import PACKED
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.embedding_model import embeddings
from automodel_cli.models.checkpoint_io.front_io import fill_front
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.freezing import freeze, trained_work
from automodel_cli.models.hub.source import composite_config, hf_config
from automodel_cli.models.lora.experts import num_used_by_a_token
from automodel_cli.models.model_part import ModelPart, model_parts
from automodel_cli.models.moe.load_balancing import LoadBalancer
from automodel_cli.models.packing_support import Rows, probe_context, probe_packing
from automodel_cli.models.precision.nf4 import packed_layers
from automodel_cli.models.score_head import EmbeddingHead, ScoreHead
from automodel_cli.objectives.base import request_of
from automodel_cli.pipelining.build_stages import build_stages
from automodel_cli.run.checks.module_names import check_names
from automodel_cli.training.metrics.flops import TrainedPart, training_flops_per_token
from automodel_cli.training.monitors.recompile_monitor import CompileWatch
from automodel_cli.training.optimizers.param_groups import trainable
from automodel_cli.training.optimizers.rate_groups import check_groups
from automodel_cli.training.stages import Stages
from automodel_cli.training.step import StepHook

if TYPE_CHECKING:
    from automodel_cli.run.recipe import Recipe


@dataclass(frozen=True)
class Model:
    """`stages` runs the model. `parts` are this rank's modules with their own type (`Stages` only has modules)."""

    mesh: Mesh
    stages: Stages
    parts: list[ModelPart]
    num_parameters: int
    num_trained: int
    step_hooks: list[StepHook] = field(default_factory=list)

    @classmethod
    def build(cls, recipe: Recipe, mesh: Mesh, *, frozen: bool = False) -> Model:
        """Build a model from its config with loaded weights and the parallelizer, complete or as pipeline stages.
        Collective. See `empty_stages`."""
        stages = empty_stages(recipe, mesh, frozen=frozen)
        device = recipe.parallelizer.parameter_device(mesh.device)
        for part in model_parts(stages.parts):
            load_weights(
                part,
                recipe.model,
                device=device,
                buffer_device=mesh.device,
                seed=recipe.seed,
                score_head=recipe.score_head,
            )
            fill_front(part, recipe.model, buffer_device=mesh.device, seed=recipe.seed)
        return cls.filled(stages, recipe, mesh)

    @classmethod
    def filled(cls, stages: Stages, recipe: Recipe, mesh: Mesh) -> Model:
        """Wrap `empty_stages` whose weights were loaded since. Collective."""
        parts = model_parts(stages.parts)
        weights_changed(parts)
        hooks = [
            *_watch_routers(parts, recipe, mesh),
            *([CompileWatch()] if compiled_regions.last() or _compiles_layers(recipe) else []),
        ]
        return cls(mesh, stages, parts, *_count_parameters(parts, mesh), hooks)

    @property
    def pp_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold the other stages, or None without a pipeline."""
        return self.stages.pp_group

    def values(self, head: ScoreHead | EmbeddingHead, rows: list[list[int]]) -> list[Tensor]:
        """Return the scores of each sequence's last token or of all its tokens, or its embedding, flat on the CPU.
        Collective."""
        batches = [one_document(ids).to(self.mesh.device) for ids in rows]
        request = HeadRequest(hidden=True, logprobs=False)
        if isinstance(head, ScoreHead):
            request = HeadRequest(scores=head.num_outputs, logprobs=False)

        def scores_of(output: HeadOutput, batch: Batch) -> Tensor:
            if isinstance(head, EmbeddingHead):
                assert output.hidden_BTD is not None, "requested"
                return embeddings(output.hidden_BTD[0], head)
            assert output.scores_BTL is not None, "this model has no value head"
            return output.scores_BTL.flatten() if head.of_tokens else output.scores_BTL[0, -1]

        return [scores.cpu() for scores in self.stages.forward(batches, scores_of, request)]

    def score(self, prompts: list[list[int]]) -> list[Tensor]:
        """Log-probs of each prompt's tokens after the first, `[len - 1]` on the CPU. Collective."""
        batches = [one_document(ids).to(self.mesh.device) for ids in prompts]
        scores = self.stages.forward(batches, lambda output, _: output.logprobs_BT[0, :-1])
        return [score.cpu() for score in scores]


def flops_per_token(recipe: Recipe, part: ModelPart, context_length: float, num_trained: int) -> float | None:
    """Return the training FLOPs per token, without recomputation.

    Counts the complete model of which `part` is a stage, with the given number of trained parameters. A value head
    replaces the vocabulary head if its logits are unused.
    """
    config, head = recipe.model, request_of(recipe.trained_objective)
    trained = None
    if recipe.train.selects:
        if config.vision is not None or config.mtp is not None:
            return None  # what their frozen parts cost is not counted
        complete = build_part(config, request=head)
        freeze(complete, recipe.train.selection)
        trained = TrainedPart(*trained_work(complete, logits=head.logprobs))
    text_is_frozen = config.vision is not None and config.vision.text == "frozen"
    return training_flops_per_token(
        part.source_config,
        context_length,
        frozen_base=config.lora is not None or text_is_frozen,
        num_adapter_params=0 if config.lora is None else num_used_by_a_token(part.model, num_trained),
        num_depths=0 if part.depth_names is None else len(part.depth_names.depths),
        num_outputs=None if head.logprobs else head.scores or int(head.values),
        trained=trained,
    )


def empty_stages(recipe: Recipe, mesh: Mesh, *, frozen: bool = False) -> Stages:
    """Build the model of a config with parameters on meta: probed, split into stages and parallelized. Collective.

    A `frozen` model is marked before sharding, so that no strategy allocates gradients. Raises ConfigError.
    """
    config = recipe.model
    _check_compile(recipe, mesh)
    if config.attn_implementation == PACKED:
        kernel_selection.choose_kernel(config.attention_kernel, mesh.device)
    if recipe.parallelizer.assumes_unpacked:
        transformers_compat.assume_unpacked()
    probe_packing(
        hf_config(config),
        attention=config.attn_implementation,
        rows=row_layout(recipe),
        trust_remote_code=config.trust_remote_code,
    )
    if mesh.layout.cp > 1:
        probe_context(hf_config(config), trust_remote_code=config.trust_remote_code)
    recipe.check_model(hf_config(config))
    check_names(recipe.optimizer, recipe.parallelizer, config, hf_config(config))
    part = build_part(config, request=request_of(recipe.trained_objective))
    if frozen:
        part.requires_grad_(False)
    else:
        freeze(part, recipe.train.selection)
        check_groups(recipe.optimizer, list(trainable([part])))
    _check_one_graph(recipe, mesh.device, part)
    if experts_modules(part) and empty_groups.torch_leaves_garbage(mesh.device, recipe.compute_dtype):
        transformers_compat.clear_empty_experts()
    return build_stages(
        part,
        mesh,
        recipe.pipeline,
        recipe.parallelizer,
        num_microbatches=recipe.train.num_microbatches(mesh.dp_size),
        picture_layers=lambda: _layers_with_pictures(config),
    )


def _layers_with_pictures(config: ModelConfig) -> int:
    """Return how many of the first decoder layers read features of pictures. Raises ConfigError."""
    if config.vision is None:
        return 0
    from automodel_cli.models.vision.processor import shared_processor
    from automodel_cli.pipelining.cut.picture_split import layers_of_first_stage

    return layers_of_first_stage(composite_config(config), shared_processor(config))


def row_layout(recipe: Recipe) -> Rows:
    """Return the kind of rows in a microbatch. A single row needs no padding, unless all rows have equal length."""
    if recipe.data.packing != "none":
        return "packed"
    return "whole" if recipe.train.microbatch_size == 1 and recipe.data.padding == "longest" else "padded"


_ONE_GRAPH = "enable_compile=true with activation_checkpointing=selective compiles each layer into one graph"
_ONE_GRAPH_KEYS = ("parallelizer.enable_compile", "parallelizer.activation_checkpointing", "model.attn_implementation")


def _layers_are_one_graph(recipe: Recipe) -> bool:
    """Each, with packed attention inside."""
    parallelizer = recipe.parallelizer
    one_graph = parallelizer.enable_compile is True and parallelizer.activation_checkpointing == "selective"
    return one_graph and recipe.model.attn_implementation == PACKED


def _check_one_graph(recipe: Recipe, device: torch.device, part: ModelPart) -> None:
    """Raise ConfigError if attention needs FlexAttention, which one graph per layer cannot contain."""
    if not _layers_are_one_graph(recipe) or device.type != "cuda" or recipe.model.attention_kernel == "dense":
        return
    dtype = recipe.parallelizer.compute_dtype() or next(part.parameters()).dtype
    if reason := flash_support.why_no_flash_on_cuda(part.model, dtype):
        raise ConfigError(
            f"{_ONE_GRAPH}, but no flash kernel supports {reason}, and FlexAttention compiles as a separate graph",
            code="kernel_unavailable",
            keys=_ONE_GRAPH_KEYS,
            fix="parallelizer.activation_checkpointing=full, or parallelizer.enable_compile=fused_ops",
        )


def _check_compile(recipe: Recipe, mesh: Mesh) -> None:
    """Packed attention on the CPU reads document boundaries on the host, where a checkpointed graph must not break."""
    if not _layers_are_one_graph(recipe):
        return
    keys = _ONE_GRAPH_KEYS
    if recipe.model.attention_kernel == "flex":
        raise ConfigError(
            f"{_ONE_GRAPH}, but attention_kernel=flex compiles as a separate graph",
            code="unsupported_combination",
            keys=keys,
            fix="parallelizer.activation_checkpointing=full, or model.attention_kernel=auto",
        )
    if mesh.device.type == "cpu":
        raise ConfigError(
            "enable_compile=true with activation_checkpointing=selective does not support packed attention on the CPU",
            code="hardware_required",
            keys=keys,
            fix="parallelizer.activation_checkpointing=full, or model.attn_implementation=sdpa",
        )


def _compiles_layers(recipe: Recipe) -> bool:
    return recipe.parallelizer.enable_compile is True


def _watch_routers(parts: list[ModelPart], recipe: Recipe, mesh: Mesh) -> list[StepHook]:
    """Return None for a dense model. Compiled layers are not split unless hooks need to act on training."""
    moe = recipe.model.moe
    if _compiles_layers(recipe) and not (moe.aux_loss_coef or moe.bias_update_rate):
        return []
    watch = LoadBalancer(parts, moe, mesh)
    return [] if watch.is_empty else [watch]


def _count_parameters(parts: list[ModelPart], mesh: Mesh) -> tuple[int, int]:
    """Return the number of parameters of the complete model and of trained ones. A tied table counts once."""
    local = {name: (p.numel(), p.requires_grad) for part in parts for name, p in part.named_parameters()}
    local |= {f"{name}.weight": (layer.num_weights, False) for part in parts for name, layer in packed_layers(part)}
    everywhere: list[dict[str, tuple[int, bool]]] = [{} for _ in range(mesh.layout.pp)]
    dist.all_gather_object(everywhere, local, group=mesh.pp.get_group())
    merged = {name: entry for of_rank in everywhere for name, entry in of_rank.items()}
    return sum(n for n, _ in merged.values()), sum(n for n, trained in merged.values() if trained)
