"""Optimizer nodes. Torch-free until `.build`. `param_groups` explains groups and weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_choice, check_range, require_package
from automodel_cli.training.optimizers.rate_groups import HasGroups, Rates

if TYPE_CHECKING:
    import torch
    from torch import nn

    from automodel_cli.training.optimizers.param_groups import TrainableParam

_8BIT_BLOCK, _8BIT_MIN = 256, 4096  # values per scale; smaller tensors keep ordinary moments
Implementation = Literal["auto", "fused", "foreach", "loop"]


def _check_adam(lr: float, betas: tuple[float, ...], eps: float, weight_decay: float) -> None:
    check_range("lr", lr, above=0, fix="optimizer.lr=1e-5")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ConfigError(
            f"betas={list(betas)} must be two numbers in [0, 1)",
            code="out_of_range",
            keys=("betas",),
            fix="optimizer.betas=[0.9,0.95]",
        )
    check_range("eps", eps, above=0, fix="optimizer.eps=1e-8")
    check_range("weight_decay", weight_decay, at_least=0, fix="optimizer.weight_decay=0.0")


def _kernel(implementation: Implementation) -> dict[str, bool]:
    """`torch.optim` keywords.

    Groups are split by mesh, so the fused kernel (CPU and CUDA) is correct for every layout. Measured on one core with
    100 matrices of 256 x 256: 4.4 ms per step, foreach 14.6, loop 13.5. As DTensors: 6.4, 21.4, 21.9.
    """
    if implementation in ("auto", "fused"):
        return {"fused": True}
    return {"foreach": implementation == "foreach", "fused": False}


def _check_implementation(chosen: str) -> None:
    check_choice("implementation", chosen, ("auto", "fused", "foreach", "loop"), fix="optimizer.implementation=auto")


@dataclass(frozen=True)
class AdamW(HasGroups):
    """`torch.optim.AdamW` (Loshchilov and Hutter 2019, arXiv:1711.05101).

    `implementation="auto"` uses the fused kernel. `state_dtype` and `stochastic_rounding` use separate code, which
    torch's compiler turns into one kernel per parameter on a CUDA device.
    """

    lr: float
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices. Biases and norms have none, embeddings and tied heads only with
    `decay_embeddings`."""
    decay_embeddings: bool = False
    """Apply weight decay to embeddings and tied heads too."""
    implementation: Implementation = "auto"
    """Implementation of the update. `auto` selects the fused kernel."""
    state_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of both moments. `auto` uses the dtype of the parameters, and float32 for float16 parameters. bfloat16
    moments of float32 parameters save 4 bytes per parameter."""
    stochastic_rounding: bool = False
    """Round bfloat16 parameters and moments stochastically, so that small updates accumulate."""

    def __post_init__(self) -> None:
        _check_adam(self.lr, self.betas, self.eps, self.weight_decay)
        self.check_groups()
        self.refuse_algorithms()
        _check_implementation(self.implementation)
        check_choice("state_dtype", self.state_dtype, ("auto", "float32", "bfloat16"), fix="optimizer.state_dtype=auto")
        if self._is_own and self.implementation != "auto":
            raise ConfigError(
                f"implementation={self.implementation} selects torch.optim.AdamW, which does not support state_dtype "
                "and stochastic_rounding",
                code="unsupported_combination",
                keys=("implementation", "state_dtype", "stochastic_rounding"),
                fix="optimizer.implementation=auto",
            )

    @property
    def _is_own(self) -> bool:
        return self.state_dtype != "auto" or self.stochastic_rounding

    def _rounded(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        import torch

        from automodel_cli.training.optimizers.stochastic_rounding_adamw import RoundedAdamW

        dtype = None if self.state_dtype == "auto" else getattr(torch, self.state_dtype)
        stored = {dtype, *(param.dtype for group in groups for param in group["params"])}
        if self.stochastic_rounding and torch.bfloat16 not in stored:
            raise ConfigError(
                "stochastic_rounding=true has no effect, because no parameter and no optimizer state is bfloat16",
                code="no_effect",
                keys=("stochastic_rounding", "state_dtype"),
                fix="optimizer.stochastic_rounding=false, or optimizer.state_dtype=bfloat16",
            )
        rounds = self.stochastic_rounding
        return RoundedAdamW(groups, self.lr, self.betas, self.eps, state_dtype=dtype, stochastic_rounding=rounds)

    def build(self, parts: Sequence[nn.Module]) -> torch.optim.Optimizer:
        import torch

        from automodel_cli.training.optimizers.param_groups import decay_groups, has_float16, require_trainable

        groups = decay_groups(
            require_trainable(parts),
            self.weight_decay,
            embeddings=self.decay_embeddings,
            rates=self.rates(parts),
            lr=self.lr,
        )
        if self._is_own or has_float16(groups):
            return self._rounded(groups)
        return torch.optim.AdamW(
            groups, lr=self.lr, betas=(self.betas[0], self.betas[1]), eps=self.eps, **_kernel(self.implementation)
        )

    def state_bytes(self, item: TrainableParam, numel: int) -> float:
        """Two moments."""
        import torch

        from automodel_cli.training.optimizers.stochastic_rounding_adamw import moment_dtype

        dtype = moment_dtype(item.param.dtype) if self.state_dtype == "auto" else getattr(torch, self.state_dtype)
        return 2.0 * float(dtype.itemsize) * numel


@dataclass(frozen=True)
class Muon(HasGroups):
    """`torch.optim.Muon` for the hidden matrices, AdamW for everything else, in one optimizer.

    Muon updates trainable parameters with exactly two dims. Exceptions are embeddings, biases and names that contain
    one of `adamw_names` (heads). Stacked experts have three dims and use AdamW. `adjust_lr="match_rms_adamw"` scales
    the update so that learning rates tuned for AdamW fit (arXiv:2502.16982). "original" is sqrt(max(1, rows /
    columns)). `adamw_lr=None` uses `lr` for AdamW too.

    Under FSDP2, each matrix is orthogonalized on one rank of its mesh. Costs are balanced, and transfers overlap with
    GEMMs. Under DDP, every rank orthogonalizes every matrix.

    `ns_dtype` is the dtype of the orthogonalization GEMMs. `auto` selects bfloat16, or float32 if a measurement at
    startup shows that the device emulates bfloat16 (10 times slower). All ranks use the same dtype, and a resumed run
    keeps it.
    """

    lr: float
    """Peak learning rate of Muon."""
    weight_decay: float = 0.1
    """Decoupled weight decay of the matrices of Muon and AdamW. Embeddings and tied heads have none without
    `decay_embeddings`."""
    decay_embeddings: bool = False
    """Apply weight decay to embeddings and tied heads too."""
    momentum: float = 0.95
    """Momentum of the gradient before it is orthogonalized."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    ns_steps: int = 5
    """Number of Newton-Schulz iterations."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Scale of the update: `match_rms_adamw` fits AdamW's learning rates (arXiv:2502.16982), `original` is
    sqrt(max(1, rows / columns))."""
    adamw_lr: float | None = None
    """Peak learning rate of AdamW, which updates the other parameters. null: `lr`."""
    adamw_betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    adamw_eps: float = 1e-8
    """Added to the root of AdamW's second moment."""
    adamw_names: tuple[str, ...] = ("lm_head", "embed", "wte", "wpe")
    """Name parts of matrices that AdamW updates, such as the head. Each custom part must match a matrix."""
    ns_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the orthogonalization GEMMs."""
    implementation: Implementation = "auto"
    """Implementation of AdamW's update. `auto` selects the fused kernel."""

    def __post_init__(self) -> None:
        _check_adam(self.lr, self.adamw_betas, self.adamw_eps, self.weight_decay)
        self.check_groups()
        _check_implementation(self.implementation)
        check_range("adamw_lr", self.adamw_lr, above=0, fix="optimizer.adamw_lr=1e-5")
        check_range("momentum", self.momentum, at_least=0, below=1, fix="optimizer.momentum=0.95")
        check_range("ns_steps", self.ns_steps, at_least=1, at_most=99, fix="optimizer.ns_steps=5")
        check_choice(
            "adjust_lr", self.adjust_lr, ("match_rms_adamw", "original"), fix="optimizer.adjust_lr=match_rms_adamw"
        )
        check_choice("ns_dtype", self.ns_dtype, ("auto", "bfloat16", "float32"), fix="optimizer.ns_dtype=auto")

    def orthogonalizes(self, item: TrainableParam) -> bool:
        """Return whether Muon updates this parameter. AdamW updates all others."""
        algorithm = Rates(self.groups).algorithm(item)
        if algorithm is not None:
            return algorithm == "muon"
        is_matrix = item.param.ndim == 2 and item.is_matrix and not item.is_embedding
        return is_matrix and not any(name in item.name for name in self.adamw_names)

    def build(self, parts: Sequence[nn.Module]) -> torch.optim.Optimizer:
        import torch

        from automodel_cli.distributed.tensors import device_of
        from automodel_cli.training.optimizers.muon import MuonWithAdamW
        from automodel_cli.training.optimizers.param_groups import require_trainable

        params = require_trainable(parts)
        return MuonWithAdamW(
            [item for item in params if self.orthogonalizes(item)],
            [item for item in params if not self.orthogonalizes(item)],
            muon={
                "lr": self.lr,
                "weight_decay": self.weight_decay,
                "momentum": self.momentum,
                "nesterov": self.nesterov,
                "ns_steps": self.ns_steps,
                "adjust_lr": self.adjust_lr,
                "ns_dtype": None if self.ns_dtype == "auto" else getattr(torch, self.ns_dtype),
            },
            adamw={
                "lr": self.lr if self.adamw_lr is None else self.adamw_lr,
                "weight_decay": self.weight_decay,
                "betas": tuple(self.adamw_betas),
                "eps": self.adamw_eps,
                **_kernel(self.implementation),
            },
            decay_embeddings=self.decay_embeddings,
            rates=self.rates(parts),
            device=device_of(parts),
        )

    def state_bytes(self, item: TrainableParam, numel: int) -> float:
        """One momentum, or AdamW's two moments."""
        from automodel_cli.training.optimizers.stochastic_rounding_adamw import moment_dtype

        return (1.0 if self.orthogonalizes(item) else 2.0) * moment_dtype(item.param.dtype).itemsize * numel


@dataclass(frozen=True)
class AdamW8bit(HasGroups):
    """AdamW with 8-bit moments, from `torchao` (any layout) or `bitsandbytes` (CUDA, unsharded parameters only)."""

    lr: float
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the two moments."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices. Biases and norms have none, embeddings and tied heads only with
    `decay_embeddings`."""
    decay_embeddings: bool = False
    """Apply weight decay to embeddings and tied heads too."""
    library: Literal["torchao", "bitsandbytes"] = "torchao"
    """Package with the kernels: torchao or bitsandbytes."""

    def __post_init__(self) -> None:
        _check_adam(self.lr, self.betas, self.eps, self.weight_decay)
        self.check_groups()
        self.refuse_algorithms()
        check_choice("library", self.library, ("torchao", "bitsandbytes"), fix="optimizer.library=torchao")
        require_package(self.library, f"library={self.library}", install=self.library, keys=("library",))

    def build(self, parts: Sequence[nn.Module]) -> torch.optim.Optimizer:
        from automodel_cli.training.optimizers.param_groups import decay_groups, require_trainable

        params = require_trainable(parts)
        sharded = next((item.name for item in params if item.mesh is not None), None)
        if self.library == "bitsandbytes" and sharded is not None:
            raise ConfigError(
                f"library=bitsandbytes does not support sharded parameters ({sharded} is sharded)",
                code="unsupported_combination",
                keys=("library",),
                fix="optimizer.library=torchao",
            )
        if self.library == "torchao":
            kind = import_module("automodel_cli.training.optimizers.torchao_adamw").QuantizedAdamW
        else:
            kind = import_module("bitsandbytes.optim").AdamW8bit
        groups = decay_groups(
            params, self.weight_decay, embeddings=self.decay_embeddings, rates=self.rates(parts), lr=self.lr
        )
        result: torch.optim.Optimizer = kind(groups, lr=self.lr, betas=tuple(self.betas), eps=self.eps)
        return result

    def state_bytes(self, item: TrainableParam, numel: int) -> float:
        """Two 8-bit moments with float32 scales per block. Small tensors keep ordinary moments."""
        if numel < _8BIT_MIN:
            return 2.0 * item.param.dtype.itemsize * numel
        return 2.0 * (numel + 4 * numel / _8BIT_BLOCK)
