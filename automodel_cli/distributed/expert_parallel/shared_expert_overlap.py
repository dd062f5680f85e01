"""Compute shared experts while the tokens of routed experts are in transit.

Families compute `experts(x) + shared(x)` and call the experts first. The shared child does not depend on them. One run
on the meta device shows which child it is: the one that receives the input of the block itself, after the experts. No
name is matched.

The experts then call `run` while they wait, and the family's own call returns the stored result. A call with any other
input computes that input.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

_TOKENS = 4


class SharedExperts:
    """The shared expert `module` of `block`. Replaces the forward of `module`, which then returns the stored result."""

    def __init__(self, block: nn.Module, module: nn.Module):
        self._own = module.forward
        self._input: Tensor | None = None  # Input of the block.
        self._result: tuple[Tensor, object] | None = None
        module.forward = self._forward
        block.register_forward_pre_hook(self._enter)

    @classmethod
    def of(cls, block: nn.Module, experts: nn.Module) -> SharedExperts | None:
        """Return the shared expert of `block`, or None if it has none that can overlap."""
        module = find_shared_expert(block, experts)
        return None if module is None else cls(block, module)

    def run(self) -> None:
        """Compute the shared expert for the current input of the block."""
        block_input, self._input = self._input, None
        if block_input is not None:
            self._result = block_input, self._own(block_input)

    def _enter(self, block: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._input, self._result = args[0] if args else None, None

    def _forward(self, *args: object, **kwargs: object) -> object:
        stored, self._result = self._result, None
        if stored is not None and len(args) == 1 and args[0] is stored[0] and not kwargs:
            return stored[1]
        return self._own(*args, **kwargs)


def find_shared_expert(block: nn.Module, experts: nn.Module) -> nn.Module | None:
    """Return the child of `block` that receives only the block's own input, after `experts` ran.

    Return None if there is no such child, or if the block does not run on the meta device. Does not change the block.
    """
    name_of = {child: name for name, child in block.named_children()}
    clone = _on_meta(block)
    of_experts = next(param for param in experts.parameters() if param.ndim == 3)
    width = of_experts.shape[1 if experts.is_transposed else 2]
    block_input = torch.empty(1, _TOKENS, width, dtype=of_experts.dtype, device="meta")
    called: list[str] = []
    candidates: list[str] = []

    def watch(name: str, child: nn.Module) -> None:
        own = child.forward

        def forward(*args: Tensor, **kwargs: object) -> object:
            called.append(name)
            if name == name_of[experts]:
                return torch.empty_like(args[0])
            if name_of[experts] in called and len(args) == 1 and args[0] is block_input and not kwargs:
                candidates.append(name)
                return torch.empty_like(block_input)
            return own(*args, **kwargs)

        child.forward = forward

    for name, child in clone.named_children():
        watch(name, child)
    try:
        with torch.no_grad():
            clone(block_input)
    except Exception as error:  # The code of a family may read values of a tensor.
        logger.info(
            "%s: shared experts are not overlapped, because the block does not run on the meta device: %s",
            type(block).__name__,
            error,
        )
        return None
    # Called twice, or two children with the block's input: the stored result could be returned to the wrong call.
    if len(candidates) != 1 or called.count(candidates[0]) != 1 or called.count(name_of[experts]) != 1:
        return None
    return block.get_submodule(candidates[0])


def _on_meta(module: nn.Module) -> nn.Module:
    """Return a copy with meta parameters, the original forward and no hooks. The original is not changed."""
    clone = copy.copy(module)
    vars(clone).pop("forward", None)
    for hooks in ("_forward_hooks", "_forward_pre_hooks"):
        setattr(clone, hooks, OrderedDict())
    for store in ("_parameters", "_buffers"):
        tensors = vars(module)[store]
        setattr(clone, store, {k: None if t is None else _empty(t) for k, t in tensors.items()})
    clone._modules = {name: None if child is None else _on_meta(child) for name, child in module._modules.items()}
    return clone


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
