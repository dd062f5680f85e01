"""`forward_step`, `set_current_microbatch` and the deferred weight gradient, against Megatron-core's definitions."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from automodel_cli.pipelining.megatron_core.config import ModelParallelConfig, ProcessGroupCollection
from automodel_cli.pipelining.megatron_core.embedding import (
    clear_embedding_activation_buffer,
    finish_embedding_wgrad_compute,
)
from automodel_cli.pipelining.megatron_core.forward_backward import forward_backward_no_pipelining
from automodel_cli.pipelining.megatron_core.step import forward_step, set_current_microbatch
from automodel_cli.pipelining.megatron_core.tensors import backward_step
from tests.dist.harness import launch

PARAMETERS = {
    forward_step: (
        *("forward_step_func", "data_iterator", "model", "num_microbatches", "input_tensor", "forward_data_store"),
        *("config", "cp_group_size", "collect_non_loss_data", "checkpoint_activations_microbatch"),
        *("is_first_microbatch", "current_microbatch", "vp_stage", "is_last_stage"),
    ),
    backward_step: ("input_tensor", "output_tensor", "output_tensor_grad", "model_type", "config"),
    set_current_microbatch: ("model", "microbatch_id"),
    clear_embedding_activation_buffer: ("config", "model", "is_last_stage"),
    finish_embedding_wgrad_compute: ("config", "embedding_module", "is_last_stage", "tp_group"),
}


@pytest.mark.parametrize("function", PARAMETERS, ids=lambda f: f.__name__)
def test_parameters_by_position(function: Any):
    assert tuple(inspect.signature(function).parameters) == PARAMETERS[function]


class Chunk(nn.Module):
    """Two weights times what it gets; `first` counts the calls of `set_is_first_microbatch`."""

    def __init__(self, config: ModelParallelConfig):
        super().__init__()
        self.config, self.weight, self.first = config, nn.Parameter(torch.tensor([2.0, 3.0])), 0

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        (self.input,) = tensors

    def set_is_first_microbatch(self) -> None:
        self.first += 1


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module


def run(loss_of: Any, *, config: ModelParallelConfig | None = None, **options: Any) -> tuple[Any, Any, list[Any]]:
    """Output, tokens and store of one microbatch of 4: the weights times the input 10."""
    config = config or ModelParallelConfig(hidden_size=2)
    chunk, store = Chunk(config), list[Any]()

    def step(iterator: Any, model: Any, *recompute: Any) -> Any:
        return chunk.weight * (next(iterator) if chunk.input is None else chunk.input), loss_of

    given = {"input_tensor": None, "cp_group_size": 1, **options}
    output, tokens = forward_step(
        step, iter([10.0]), Wrapper(chunk), 4, forward_data_store=store, config=config, **given
    )
    return output, tokens, store


def test_a_pair_is_divided_by_the_number_of_microbatches():
    output, tokens, store = run(lambda out: (out.sum(), "data"), cp_group_size=2)
    assert output.item() == 50 * 2 / 4 and tokens == 0 and store == ["data"]


def test_a_triple_is_divided_by_its_tokens_too():
    output, tokens, store = run(lambda out: (out.sum(), torch.tensor(5), "data"))
    assert output.item() == 50 / 5 / 4 and tokens == 5 and store == ["data"]
    per_token = ModelParallelConfig(hidden_size=2, calculate_per_token_loss=True)
    output, tokens, _ = run(lambda out: (out.sum(), torch.tensor(5), "data"), config=per_token)
    assert output.item() == 50 and tokens == 5, "divided once, by the tokens of all microbatches, after the step"


def test_any_data_is_collected_as_it_is():
    data = {"anything": [1, 2]}
    output, _, store = run(lambda out, non_loss_data: data, collect_non_loss_data=True)
    assert output.tolist() == [20.0, 30.0] and store == [data]


def test_other_stages_hand_on_their_output():
    received = torch.ones(2)
    output, tokens, store = run(None, input_tensor=[received], is_last_stage=False)
    assert isinstance(output, list) and output[0].tolist() == [2.0, 3.0] and tokens == 0 and store == []


def test_the_first_microbatch_and_the_stage():
    chunk = Chunk(ModelParallelConfig(hidden_size=2))
    chunk.vp_stage = 1

    def step(iterator: Any, model: Any, recompute: bool) -> Any:
        return chunk.weight.sum() * (1.0 if recompute else 0.0), None

    given = (step, None, chunk, 1, None, [], chunk.config, 1, False, True)
    output, _ = forward_step(*given, is_first_microbatch=True, vp_stage=1)
    assert output.item() == 5.0 and chunk.first == 1
    with pytest.raises(ValueError, match="vp_stage=0"):
        forward_step(*given, vp_stage=0)


def test_autocast():
    config = ModelParallelConfig(hidden_size=2, enable_autocast=True, autocast_dtype=torch.bfloat16)
    chunk = Chunk(config)
    dtypes: list[torch.dtype] = []

    def step(iterator: Any, model: Any) -> Any:
        dtypes.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        return chunk.weight, None

    forward_step(step, None, chunk, 1, None, [], config, 1)
    assert dtypes == [torch.bfloat16]


def test_layers_know_their_microbatch():
    layer = lambda: nn.Linear(1, 1)  # noqa: E731
    model = nn.Module()
    model.decoder, model.mtp = nn.Module(), nn.Module()
    model.decoder.layers = nn.ModuleList([layer(), layer()])
    further = nn.Module()
    further.transformer_layer = layer()
    model.mtp.layers = nn.ModuleList([further])
    set_current_microbatch(Wrapper(model), 3)
    layers = [*model.decoder.layers, further.transformer_layer]
    assert [of_layer.current_microbatch for of_layer in layers] == [3, 3, 3]
    set_current_microbatch(layer(), 3)  # no decoder: nothing to set


class _Deferred(torch.autograd.Function):
    """A linear layer without a weight gradient: it keeps what that is made of."""

    @staticmethod
    def forward(ctx: Any, hidden_SBH: Tensor, weight_VH: Tensor, chunk: Any) -> Tensor:
        ctx.weight, ctx.chunk = weight_VH, chunk
        chunk.embedding_activation_buffer.append(hidden_SBH.detach())
        return hidden_SBH @ weight_VH.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.chunk.grad_output_buffer.append(grads[0])
        return grads[0] @ ctx.weight, None, None


class Output(nn.Module):
    """An embedding and an output layer, whose weight gradient is deferred or not."""

    def __init__(self, config: ModelParallelConfig):
        super().__init__()
        torch.manual_seed(0)
        self.config, self.share_embeddings_and_output_weights = config, False
        self.hidden = nn.Parameter(torch.randn(6, 2, 4))
        self.output_layer = nn.Linear(4, 5, bias=False)
        self.embedding_activation_buffer: list[Tensor] = [torch.ones(1)]  # a stray one of an earlier step
        self.grad_output_buffer: list[Tensor] = []

    def shared_embedding_or_output_weight(self) -> nn.Parameter:
        return self.output_layer.weight

    def set_input_tensor(self, tensors: list[Tensor | None]) -> None:
        pass

    def forward(self, number: int) -> Tensor:
        hidden_SBH = self.hidden * (number + 1)
        if self.config.defer_embedding_wgrad_compute:
            return _Deferred.apply(hidden_SBH, self.output_layer.weight, self)  # type: ignore[no-any-return]
        return self.output_layer(hidden_SBH)


def step_of(deferred: bool, *, main_grad: bool = False) -> tuple[Tensor, Tensor, int]:
    """Gradients of both parameters after a step of three microbatches, and how much is left in the buffers."""
    finalized: list[Tensor] = []

    def finalize(models: Any, tokens: Any) -> None:
        weight = model.output_layer.weight
        finalized.append((weight.main_grad if main_grad else weight.grad).clone())

    config = ModelParallelConfig(4, defer_embedding_wgrad_compute=deferred, finalize_model_grads_func=finalize)
    model = Output(config)
    if main_grad:
        model.output_layer.weight.main_grad = torch.zeros(5, 4, dtype=torch.float64)

    def forward(iterator: Any, chunk: Any) -> Any:
        return chunk(next(iterator)), lambda out: (out.square().sum(), {})

    forward_backward_no_pipelining(
        forward_step_func=forward,
        data_iterator=iter(range(3)),
        model=model,
        num_microbatches=3,
        seq_length=6,
        micro_batch_size=2,
    )
    assert model.hidden.grad is not None
    left = len(model.embedding_activation_buffer) + len(model.grad_output_buffer)
    return finalized[0], model.hidden.grad, left if deferred else 0


@pytest.mark.parametrize("main_grad", [False, True])
def test_a_deferred_weight_gradient_is_that_of_autograd_before_gradients_are_finalized(main_grad: bool):
    want, want_hidden, _ = step_of(False)
    weight, hidden, left = step_of(True, main_grad=main_grad)
    torch.testing.assert_close(weight.float(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hidden, want_hidden)
    assert left == 0


def gathered(rank: int, world: int) -> Tensor:
    """The weight gradient of a rank that has a slice of the sequence of its inputs."""
    config = ModelParallelConfig(4, sequence_parallel=True, defer_embedding_wgrad_compute=True)
    chunk = Output(config)
    group = dist.group.WORLD
    assert clear_embedding_activation_buffer(config, [None, chunk], True) is chunk
    generator = torch.Generator().manual_seed(1)
    inputs_SBH, grads_SBV = (torch.randn(6, 2, n, generator=generator) for n in (4, 5))
    chunk.embedding_activation_buffer.append(inputs_SBH.chunk(world)[rank])
    chunk.grad_output_buffer.append(grads_SBV)
    finish_embedding_wgrad_compute(config, chunk, True, ProcessGroupCollection(tp=group).tp)
    want = torch.einsum("sbv,sbh->vh", grads_SBV, inputs_SBH)
    assert chunk.output_layer.weight.grad is not None
    return chunk.output_layer.weight.grad - want


def test_inputs_are_gathered_under_sequence_parallelism():
    assert launch(gathered, 2).abs().max() < 1e-5


def test_nothing_is_deferred_elsewhere():
    config = ModelParallelConfig(4, defer_embedding_wgrad_compute=True)
    chunk = Output(config)
    assert clear_embedding_activation_buffer(config, chunk, False) is None
    assert clear_embedding_activation_buffer(ModelParallelConfig(4), chunk, True) is None
    assert len(chunk.embedding_activation_buffer) == 1
    chunk.grad_output_buffer += [torch.ones(1), torch.ones(1)]
    finish_embedding_wgrad_compute(config, chunk, False, None)
    assert chunk.output_layer.weight.grad is None
    with pytest.raises(ValueError, match="1 inputs"):
        finish_embedding_wgrad_compute(config, chunk, True, None)
