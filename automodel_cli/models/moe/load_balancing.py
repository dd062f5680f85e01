"""MoE load balancing: auxiliary loss, selection bias and load metrics.

Hooks on the routers of the unmodified model. All state is local to a layer, so nothing crosses pipeline stages. Only
*real* tokens count: tokens of documents with at least one label. Tokens of a shared prefix count once. Padding and
untrained documents do not count.

**Loss.** `aux_loss_coef` adds `coef * n / N * balance` per layer and microbatch. n of the step's N real tokens are in
the microbatch. Data-parallel ranks have their own microbatches, context-parallel ranks share one.

    balance = E * sum_e(f_e * P_e)     f_e: choices of expert e per token, P_e: mean of softmax(logits)_e

This is `load_balancing_loss_func` of transformers for one layer. With perfect balance it equals top-k. Example: E = 4,
top-1 and all tokens on expert 0 with probability 1 give 4 * 1 * 1 = 4 instead of 1. The value is not added to the loss.
Its gradient is added at the routing weights, exactly once, also with recomputation.

**Bias.** `bias_update_rate` moves the selection bias of routers that have one (`e_score_correction_bias`: DeepSeek-V3,
arXiv:2412.19437, section 2.1.2) by `rate * sign(mean load - load)`, once per optimizer step, from the loads of all
ranks. transformers stores this bias and does not update it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.config.errors import ConfigError
from automodel_cli.data.batch import Batch, SeenKeys
from automodel_cli.distributed.expert_parallel.router_detection import routers_in
from automodel_cli.distributed.mesh import Mesh
from automodel_cli.distributed.typed_torch import Ctx, Function, disable
from automodel_cli.models.context_parallel_layout import Context
from automodel_cli.models.moe.real_tokens import real_tokens
from automodel_cli.models.moe_config import MoEConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Example of the loss: E = 2, top-1, router probabilities of expert 0 [0.75, 0.75, 0.5, 0.25]. Three tokens select
# expert 0 (a tie selects the first), so f = [0.75, 0.25]. P = [0.5625, 0.4375]. balance = 2 (0.75 * 0.5625 + 0.25 *
# 0.4375) = 1.0625. Perfect balance is 1.
class LoadBalancer:
    """`StepHook` that balances experts.

    Collective over all ranks: `begin` if there is a loss, `finish` always. Create it on every rank, also on pipeline
    stages without experts.
    """

    def __init__(self, parts: Sequence[nn.Module], config: MoEConfig, mesh: Mesh):
        self._config, self._mesh = config, mesh
        entries = [entry for part in parts for entry in routers(part)]
        sizes = {name: _num_experts(router) for name, _, router in entries}
        stage_sizes: list[dict[str, int]] = [{} for _ in range(mesh.pp.size())]
        dist.all_gather_object(stage_sizes, sizes, group=mesh.pp.get_group())
        all_sizes = {name: size for sizes_of_stage in stage_sizes for name, size in sizes_of_stage.items()}
        self._sizes = list(all_sizes.values())
        # All layers in one table, so that a step has one collective instead of one per layer.
        width = max(self._sizes, default=0) + 1  # one load per expert, then the loss
        self._table = torch.zeros(len(all_sizes), width, dtype=torch.float64, device=mesh.device)
        rows = {name: row for row, name in enumerate(all_sizes)}
        self._layers = [_Layer(self, config, rows[name], block, router, name) for name, block, router in entries]
        self._check_options(parts)
        for part in parts if entries else ():  # without routers, the mask is not needed
            part.register_forward_pre_hook(self._enter_part, with_kwargs=True)
            part.register_forward_hook(self._leave_part, always_call=True)
            # The transformers model inside receives the local tokens.
            model = cast("PreTrainedModel", part.model)
            model.base_model.register_forward_pre_hook(self._enter_model, with_kwargs=True)
        self.mask_BT: Tensor | None = None
        self._real_NK: dict[int, Tensor] = {}
        self.num_tokens = torch.ones((), dtype=torch.float64, device=mesh.device)

    @property
    def is_empty(self) -> bool:
        """Whether the model has no experts, or no supported router."""
        return not self._sizes

    def _check_options(self, parts: Sequence[nn.Module]) -> None:
        options = {"aux_loss_coef": self._config.aux_loss_coef, "bias_update_rate": self._config.bias_update_rate}
        biases = [layer.bias is not None for layer in self._layers]
        has_local_bias = torch.tensor([float(any(biases))], device=self._mesh.device)
        has_bias = bool(self._mesh.sum_over(self._mesh.pp, has_local_bias))
        for name, value in options.items():
            reason = "has no mixture of experts with a supported router" if self.is_empty else None
            if name == "bias_update_rate" and not self.is_empty and not has_bias:
                reason = "has routers without a selection bias (e_score_correction_bias)"
            if value and reason:
                raise ConfigError(
                    f"{name}={value} is not supported because {type(parts[0].model).__name__} {reason}",
                    code="not_supported_by_model",
                    keys=(f"model.moe.{name}",),
                    fix=f"model.moe.{name}=0",
                )

    # The mask of the current microbatch is set while a part runs, and not during recomputation in backward.

    def _enter_part(self, part: nn.Module, args: object, kwargs: dict[str, Tensor]) -> None:
        self._leave_part()
        if part.training and torch.is_grad_enabled():
            self.mask_BT = real_tokens(kwargs["labels"], kwargs["cu_seq_lens_q"], SeenKeys.among(kwargs))

    def _enter_model(self, model: nn.Module, args: object, kwargs: dict[str, object]) -> None:
        context = cast(Context | None, kwargs.get("context"))
        if self.mask_BT is not None and context is not None:
            self.mask_BT = context.local(self.mask_BT.long(), 0).bool()

    def _leave_part(self, *_: object) -> None:
        self.mask_BT = None
        self._real_NK.clear()

    # Called by the training step.

    def begin(self, batches: Sequence[Batch]) -> None:
        """Begin a step with these microbatches (on the device) and reset the counts."""
        self._table.zero_()
        if self._config.aux_loss_coef:
            counts = [real_tokens(batch.labels_BT, batch.cu_seqlens, batch.seen).sum() for batch in batches]
            # N must be known before the first backward: the gradient of each microbatch is divided by it.
            self.num_tokens = self._mesh.sum_over(self._mesh.dp, torch.stack(counts).sum().double()).clamp(min=1)

    @torch.no_grad()
    def finish(self) -> dict[str, Tensor]:
        """Update selection biases after the step and return metrics.

        - `expert_load_max`: load of the most loaded expert divided by the mean, in the worst layer.
        - `expert_load_cv`: standard deviation divided by mean, averaged over layers.
        - `aux_loss`: the auxiliary loss, summed over layers.
        """
        if self.is_empty:
            return {}
        # One collective for all layers: a row per layer, a column per expert, and the loss in the last column.
        dist.all_reduce(self._table)
        # TP ranks have equal tokens. CP ranks have different tokens but equal losses.
        losses = self._table[:, -1] / (self._mesh.tp.size() * self._mesh.cp.size())
        loads = [self._table[row, :size] for row, size in enumerate(self._sizes)]
        means = [load.mean() for load in loads]  # 0 for unsupported routers. Their metrics are nan, written as null.
        for layer in self._layers:
            layer.move_bias(self._config.bias_update_rate, loads[layer.row])
        worst = [load.max() / mean for load, mean in zip(loads, means, strict=True)]
        spread = [load.std(correction=0) / mean for load, mean in zip(loads, means, strict=True)]
        metrics = {"expert_load_max": torch.stack(worst).max(), "expert_load_cv": torch.stack(spread).mean()}
        return metrics | ({"aux_loss": losses.sum()} if self._config.aux_loss_coef else {})

    # Called by layers.

    def count(self, row: int, index_NK: Tensor, num_experts: int, *, separate: bool) -> Tensor | None:
        """Add the choices of a layer on one microbatch to those of the step.

        Returns them as float64 `[E]` if `separate`. Otherwise uses one kernel and returns None.
        """
        assert self.mask_BT is not None
        choices = index_NK.shape[1]
        if choices not in self._real_NK:
            self._real_NK[choices] = self.mask_BT.flatten().to(self._table.dtype).repeat_interleave(choices)
        load_E = self._table[row, :num_experts]
        added_E = torch.zeros_like(load_E) if separate else load_E
        added_E.index_add_(0, index_NK.flatten(), self._real_NK[choices])
        if not separate:
            return None
        load_E += added_E
        return added_E

    def balance(self, row: int, logits_NE: Tensor, load_E: Tensor, mask_N: Tensor) -> Tensor:
        """Add the loss of a layer on one microbatch to that of the step. Return its gradient with respect to the
        logits.

        Collective over context-parallel ranks.
        """
        # coef * n / N * E * sum_e (c_e / n) (m_e / n) with c_e choices and m_e probability mass. The choices c_e are
        # counts and have no gradient.
        probs_NE = logits_NE.float().softmax(-1)
        sums = torch.cat([load_E, (probs_NE * mask_N[:, None]).sum(0).double(), mask_N.sum()[None].double()])
        if self._mesh.cp.size() > 1:
            sums = self._mesh.sum_over(self._mesh.cp, sums)
        num_experts = len(load_E)
        choices_E, mass_E, count = sums.split([num_experts, num_experts, 1])
        # d loss / d probs of one token. The n of the mean cancels with the n of the weight n / N.
        slope_E = self._config.aux_loss_coef * num_experts * choices_E / count.clamp(min=1) / self.num_tokens
        self._table[row, -1] += (slope_E * mass_E).sum()
        slope_E = slope_E.to(probs_NE.dtype)
        # Backward of softmax: dz = p (s - sum(p s)). Tokens outside the mask get no gradient.
        grad_NE = probs_NE * (slope_E - (probs_NE * slope_E).sum(-1, keepdim=True)) * mask_N[:, None]
        result: Tensor = grad_NE.to(logits_NE.dtype)
        return result


class _Layer:
    """One router of this rank."""

    def __init__(
        self, watch: LoadBalancer, config: MoEConfig, row: int, block: nn.Module, router: nn.Module, name: str
    ):
        self.watch, self.row, self.name = watch, row, name
        self.bias = _selection_bias(block, router)
        self.has_loss = config.aux_loss_coef > 0
        self.acts = self.has_loss or config.bias_update_rate > 0
        router.register_forward_hook(self._hook)

    # Data-dependent counting is excluded from compiled graphs.
    @disable()
    def _hook(self, router: nn.Module, args: object, output: Tensor) -> object:
        if not (router.training and torch.is_grad_enabled()):
            return None
        if not _is_supported(output):
            if self.acts:
                raise _unsupported_router(self.name)
            return None
        logits_NE, weights_NK, index_NK = output[:3]
        load_E = mask_N = None
        if self.watch.mask_BT is not None:
            mask_N = self.watch.mask_BT.flatten()
            load_E = self.watch.count(self.row, index_NK, logits_NE.shape[-1], separate=self.has_loss)
        if not self.has_loss:
            return None
        return (logits_NE, _AttachLoss.apply(weights_NK, logits_NE, load_E, mask_N, self), index_NK, *output[3:])

    def move_bias(self, speed: float, load_E: Tensor) -> None:
        if speed and self.bias is not None:
            # Example: loads [6, 1, 1] have mean 2.67. With rate 0.001, the biases move by [-0.001, +0.001, +0.001].
            self.bias += (speed * torch.sign(load_E.mean() - load_E)).to(self.bias.dtype).view_as(self.bias)


class _AttachLoss(Function):
    """Identity on routing weights. In backward, adds the gradient of the load-balancing loss to that of the logits.

    Recomputation calls it again, only to save the logits. Loads and mask are attributes of the first call, not saved
    tensors, so they belong to the right microbatch.
    """

    @staticmethod
    def forward(
        ctx: Ctx, weights_NK: Tensor, logits_NE: Tensor, load_E: Tensor | None, mask_N: Tensor | None, layer: _Layer
    ) -> Tensor:
        ctx.save_for_backward(logits_NE)
        ctx.load_E, ctx.mask_N, ctx.layer = load_E, mask_N, layer
        return weights_NK.view_as(weights_NK)

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (logits_NE,) = ctx.saved_tensors
        layer: _Layer = ctx.layer
        return grads[0], layer.watch.balance(layer.row, logits_NE, ctx.load_E, ctx.mask_N), None, None, None


def routers(part: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Yield `(name, block, router)` of every mixture of experts."""
    for name, block in part.named_modules():
        for child_name, router in routers_in(block):
            yield f"{name}.{child_name}", block, router


def _num_experts(router: nn.Module) -> int:
    weight = router._parameters["weight"]
    assert weight is not None
    return weight.shape[0]


def _selection_bias(block: nn.Module, router: nn.Module) -> Tensor | None:
    """Return the selection bias. It is on the router in most families, on the block in others (MiniMax-M2)."""
    for holder in (router, block):
        for name, buffer in holder.named_buffers(recurse=False):
            if name.endswith("e_score_correction_bias"):
                return buffer
    return None


def _is_supported(output: Tensor) -> bool:
    """Return whether a router output begins with (logits [N, E], weights [N, K], experts [N, K])."""
    if not isinstance(output, tuple) or len(output) < 3 or not all(isinstance(t, Tensor) for t in output[:3]):
        return False
    logits, weights, index = output[:3]
    return logits.ndim == 2 and weights.shape == index.shape and not index.is_floating_point()


def _unsupported_router(name: str) -> ConfigError:
    return ConfigError(
        f"load balancing is not supported because the router {name} does not return (logits, weights, experts)",
        code="not_supported_by_model",
        keys=("model.moe",),
        fix="model.moe.aux_loss_coef=0 model.moe.bias_update_rate=0",
    )
