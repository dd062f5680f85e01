"""The head: what it is, everything it gives and its gradients against the plain definition, and what it skips."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.data.head_output import HeadOutput, HeadRequest
from automodel_cli.distributed.wgrad_fusion.linear import add_product_
from automodel_cli.models.lm_head import head as head_module
from automodel_cli.models.lm_head.detection import classify, detect_head, head_logits
from automodel_cli.models.lm_head.fused_linear_logprobs import fused_scores
from automodel_cli.models.lm_head.head import Head, HeadKind, default_chunk_size
from automodel_cli.models.lm_head.sampling_transform import SamplingTransform
from automodel_cli.models.lm_head.scores import Settings
from automodel_cli.parity.reference import output_of
from tests.tiny import build_hf, packed_batch, reference_logprobs, tiny_config, token_row

VOCAB, WIDTH = 50, 12
EXPECTED = {"llama": "plain", "gemma3_text": "plain", "gpt_oss": "plain", "gemma2": "softcap", "granite": "scale"}


@pytest.mark.smoke
@pytest.mark.parametrize("family", EXPECTED)
def test_detection_by_measurement(family: str):
    kind = detect_head(tiny_config(family))
    assert kind.name == EXPECTED[family]
    if family == "granite":
        assert kind.value == pytest.approx(1 / 4.0)
    if family == "gemma2":
        assert kind.value == 30.0


def test_a_scale_that_depends_on_the_width_is_measured_at_the_users_width():
    config = tiny_config("granite", hidden_size=128)
    assert detect_head(config).value == pytest.approx(0.25)


def test_a_config_is_measured_once():
    found = [detect_head(tiny_config("granite", hidden_size=width, logits_scaling=8.0)) for width in (64, 64, 32)]
    assert found[0] is found[1] is not found[2] and found[0] == found[2]


def test_something_else_is_generic():
    product = torch.randn(1, 8, 20)
    assert classify(product.abs(), product, None).name == "generic"
    assert classify(product + 0.1, product, None).name == "generic"
    assert classify(product * -3, product, None) == HeadKind("scale", pytest.approx(-3))
    assert classify(5 * torch.tanh(product / 5), product, 7.0).name == "generic"


def _final(product: torch.Tensor, kind: HeadKind) -> torch.Tensor:
    if kind.name == "scale":
        return product * kind.value
    return kind.value * torch.tanh(product / kind.value) if kind.name == "softcap" else product


KINDS = [HeadKind("plain"), HeadKind("scale", 0.3), HeadKind("softcap", 2.5)]
EVERYTHING = HeadRequest(entropy=True, topk=3, token_ids="teacher", lse=True)


@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_fused_equals_the_definition(kind: HeadKind, uniform: bool):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, WIDTH, generator=generator, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, generator=generator, requires_grad=True)
    labels = torch.randint(0, VOCAB, (23,), generator=generator)
    incoming = torch.full((23,), -0.7) if uniform else torch.randn(23, generator=generator)
    logits = _final(hidden @ weight.t(), kind)
    expected = reference_logprobs(logits, labels)
    want = torch.autograd.grad((expected * incoming).sum(), (hidden, weight))
    logprobs = fused_scores(hidden, weight, labels[:, None], Settings(kind, 5)).logprobs_SN[:, 0]
    got = torch.autograd.grad((logprobs * incoming).sum(), (hidden, weight))
    assert torch.allclose(logprobs, expected, atol=2e-6)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)


def _case(kind: HeadKind | None) -> tuple[Head, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A head in chunks of 4 tokens, its hidden states, labels (some ignored) and a teacher's tokens (some absent)."""
    generator = torch.Generator().manual_seed(1)
    model = build_hf("llama")
    if kind is None:
        model.lm_head = nn.Linear(64, 160)  # the bias takes it off the fused path
    with torch.no_grad():
        model.lm_head.weight.normal_(generator=generator)
    hidden_BTD = torch.randn(2, 9, 64, generator=generator) * 0.2
    labels_BT = torch.randint(0, 160, (2, 9), generator=generator)
    labels_BT[0, 3] = labels_BT[1, :2] = IGNORE_INDEX
    teacher_BTN = torch.randint(0, 160, (2, 9, 5), generator=generator)
    teacher_BTN[:, ::2, 3:] = IGNORE_INDEX
    return Head(model, kind or HeadKind("plain"), chunk_size=4), hidden_BTD, labels_BT, teacher_BTN


def _gradients_of(
    output: HeadOutput, fields: tuple[str, ...], leaves: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """With another incoming gradient for every number of these fields."""
    total = torch.zeros((), dtype=torch.float64)
    for seed, name in enumerate(fields):
        value = getattr(output, name).double()
        total = total + (value * torch.randn(value.shape, generator=torch.Generator().manual_seed(seed)).double()).sum()
    return torch.autograd.grad(total, leaves)


DIFFERENTIABLE = ("logprobs_BT", "entropy_BT", "topk_logprobs_BTK", "token_logprobs_BTN", "lse_BT")


@pytest.mark.parametrize("fields", [*((name,) for name in DIFFERENTIABLE), DIFFERENTIABLE], ids=lambda f: f[-1][:5])
@pytest.mark.parametrize("kind", [*KINDS, None], ids=lambda kind: kind.name if kind else "generic")
def test_every_field_and_its_gradients_are_those_of_whole_logits(kind: HeadKind | None, fields: tuple[str, ...]):
    head, hidden_BTD, labels_BT, teacher_BTN = _case(kind)
    linear = head.model.lm_head
    got = head(hidden_BTD.requires_grad_(), labels_BT, EVERYTHING, teacher_BTN)
    hidden_64, weight_64 = (t.detach().double().requires_grad_() for t in (hidden_BTD, linear.weight))
    bias = 0 if linear.bias is None else linear.bias.detach().double()
    logits = _final(hidden_64 @ weight_64.t() + bias, head.kind)
    want = output_of(logits.flatten(0, 1), labels_BT.flatten(), EVERYTHING, teacher_BTN.flatten(0, 1))
    for name in (*DIFFERENTIABLE, "topk_ids_BTK"):
        ours, theirs = getattr(got, name), getattr(want, name)
        assert ours.shape[:2] == labels_BT.shape, name
        assert torch.allclose(ours.flatten(0, 1).double(), theirs.double(), atol=1e-5), name
    grads = zip(
        _gradients_of(got, fields, (hidden_BTD, linear.weight)),
        _gradients_of(want.map(lambda field: field.unflatten(0, (2, 9))), fields, (hidden_64, weight_64)),
        strict=True,
    )
    for ours, theirs in grads:
        assert (ours - theirs).abs().max() < 3e-6 * theirs.abs().max()


@pytest.mark.parametrize(
    "shaping", [SamplingTransform(temperature=0.7), SamplingTransform(temperature=1.3, top_k=20, top_p=0.9)]
)
@pytest.mark.parametrize("kind", [*KINDS, None], ids=lambda kind: kind.name if kind else "generic")
def test_entropies_log_probs_and_gradients_are_those_of_the_distribution_that_was_drawn_from(
    kind, shaping: SamplingTransform
):
    head, hidden_BTD, labels_BT, _ = _case(kind)
    head.shaping = shaping
    got = head(hidden_BTD.requires_grad_(), labels_BT, HeadRequest(entropy=True))
    index = (labels_BT != IGNORE_INDEX).flatten().nonzero()[:, 0]
    hidden_64 = hidden_BTD.detach().double().flatten(0, 1)[index].requires_grad_()
    linear = head.model.lm_head
    product = hidden_64 @ linear.weight.detach().double().t() + (0 if linear.bias is None else linear.bias.detach())
    shaped = shaping(_final(product, head.kind), labels_BT.flatten()[index])
    probs = shaped.softmax(-1)
    entropy_S = torch.special.entr(probs).sum(-1)
    assert (got.entropy_BT.flatten()[index] - entropy_S).abs().max() < 1e-5
    logp = shaped.log_softmax(-1)
    picked_S = logp.gather(1, labels_BT.flatten()[index, None])[:, 0]
    assert (got.logprobs_BT.flatten()[index] - picked_S).abs().max() < 1e-5
    again_S = -(probs * logp.masked_fill(logp.isinf(), 0)).sum(-1)
    incoming_S = torch.linspace(-1, 1, len(index))
    for of_entropy, of_logprob in ((1, 0), (0, 1), (1, -0.5)):
        (ours,) = torch.autograd.grad(
            (got.entropy_BT.flatten()[index] * incoming_S * of_entropy).sum()
            + (got.logprobs_BT.flatten()[index] * incoming_S * of_logprob).sum(),
            hidden_BTD,
            retain_graph=True,
        )
        total = (again_S * incoming_S * of_entropy).sum() + (picked_S * incoming_S * of_logprob).sum()
        (theirs,) = torch.autograd.grad(total, hidden_64, retain_graph=True)
        assert (ours.flatten(0, 1)[index] - theirs).abs().max() < 1e-5 * theirs.abs().max()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_without_entropies_too_and_for_equal_gradients(kind: HeadKind):
    """What forward then keeps for its backward."""
    head, hidden_BTD, labels_BT, _ = _case(kind)
    head.shaping = SamplingTransform(temperature=0.7)
    index = (labels_BT != IGNORE_INDEX).flatten().nonzero()[:, 0]
    leaves = (hidden_BTD.requires_grad_(), head.model.lm_head.weight)
    wanted = tuple(leaf.detach().double().requires_grad_() for leaf in leaves)
    logits = head.shaping(_final(wanted[0].flatten(0, 1)[index] @ wanted[1].t(), kind).float())
    want = torch.autograd.grad(reference_logprobs(logits, labels_BT.flatten()[index]).sum() * -0.3, wanted)
    got = torch.autograd.grad(head(hidden_BTD, labels_BT).logprobs_BT.sum() * -0.3, leaves)
    for ours, theirs in zip(got, want, strict=True):
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_chunks_of_a_cpu_stay_in_the_caches_of_its_cores_and_are_long_enough_for_products():
    cpu, before = torch.device("cpu"), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert [default_chunk_size(vocab, cpu) for vocab in (256, 8_192, 131_072)] == [1024, 256, 48]
        torch.set_num_threads(2)
        assert default_chunk_size(256, cpu) == 2048
    finally:
        torch.set_num_threads(before)


def test_entropy_of_confident_and_of_flat_logits_is_exact_to_float32():
    weight = torch.cat([torch.full((1, 1), 90.0), torch.full((VOCAB - 1, 1), 60.0)])
    hidden = torch.tensor([[1.0], [0.0], [0.05]])
    settings = Settings(KINDS[0], 2, entropy=True)
    entropy_S = fused_scores(hidden, weight, torch.zeros(3, 1, dtype=torch.long), settings).entropy_S
    want = torch.special.entr((hidden.double() @ weight.double().t()).softmax(-1)).sum(-1)
    assert entropy_S is not None and torch.allclose(entropy_S.double(), want, rtol=2e-6, atol=1e-10)


def test_a_frozen_weight_gets_no_gradient_and_bf16_stays_close():
    hidden = torch.randn(9, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.bfloat16)
    labels = torch.randint(0, VOCAB, (9,))
    logprobs = fused_scores(hidden, weight, labels[:, None], Settings(HeadKind("plain"), 4)).logprobs_SN[:, 0]
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32 and weight.grad is None and hidden.grad is not None
    assert torch.allclose(logprobs, reference_logprobs(hidden.float() @ weight.float().t(), labels), atol=0.1)


def test_hidden_states_in_fp32_meet_a_head_in_bf16_as_in_the_librarys_mamba():
    model = build_hf("llama").bfloat16()
    hidden_BTD = torch.randn(1, 5, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels_BT = torch.tensor([[3, 4, 5, 6, 7]])
    head = Head(model, HeadKind("plain"))
    got_BT = head(hidden_BTD, labels_BT).logprobs_BT
    want = model.lm_head(hidden_BTD.to(model.lm_head.weight.dtype)).float().log_softmax(-1)
    torch.testing.assert_close(got_BT, want.gather(-1, labels_BT[..., None])[..., 0], atol=2e-2, rtol=0)
    got_BT.sum().backward()
    assert hidden_BTD.grad.dtype == torch.float32 and hidden_BTD.grad.any()
    assert head.logits(hidden_BTD[0]).isfinite().all()


def test_a_product_of_bf16_adds_to_float32_without_a_copy_of_the_total():
    left, right = (torch.randn(shape, dtype=torch.bfloat16) for shape in ((300, 8), (8, 40)))
    total = torch.full((300, 40), 1000.0)
    add_product_(total, left, right)
    exact = 1000.0 + left.double() @ right.double()
    assert (total - exact).abs().max() < 2.0**-7 * (left.float() @ right.float()).abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_first_product_does_not_read_what_it_overwrites(dtype: torch.dtype):
    left, right = (torch.randn(shape).to(dtype) for shape in ((300, 8), (8, 40)))
    total = torch.full((300, 40), torch.nan)
    add_product_(total, left, right, first=True)
    add_product_(total, left, right)
    exact = 2 * (left.double() @ right.double())
    assert (total - exact).abs().max() < 2.0**-7 * exact.abs().max()


def test_a_weight_of_which_no_token_has_a_label_gets_a_gradient_of_zero():
    hidden, weight = torch.randn(0, WIDTH, requires_grad=True), torch.randn(VOCAB, WIDTH, requires_grad=True)
    none = torch.zeros(0, 1, dtype=torch.long)
    fused_scores(hidden, weight, none, Settings(HeadKind("plain"), 4, entropy=True)).logprobs_SN.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


@pytest.mark.parametrize("kind", ["plain", "generic"])
def test_only_supervised_positions_are_computed(kind: str, monkeypatch: pytest.MonkeyPatch):
    model = build_hf("llama")
    seen = []

    def counted(real):
        def count(owner, hidden, *rest):
            seen.append(hidden.flatten(0, -2).shape[0])
            return real(owner, hidden, *rest)

        return count

    monkeypatch.setattr(Settings, "logits", counted(Settings.logits))
    monkeypatch.setattr(head_module, "head_logits", counted(head_logits))
    labels = torch.full((2, 16), IGNORE_INDEX)
    labels[0, 3] = labels[1, 7] = labels[1, 8] = 5
    hidden = torch.randn(2, 16, 64, requires_grad=True)
    logprobs = Head(model, HeadKind(kind))(hidden, labels).logprobs_BT  # type: ignore[arg-type]
    assert sum(seen) == 3
    assert (logprobs != 0).nonzero().tolist() == [[0, 3], [1, 7], [1, 8]]
    logprobs.sum().backward()
    assert hidden.grad is not None and (hidden.grad.abs().sum(-1) > 0).sum() == 3


class _Operators(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_label_positions_are_found_on_the_host_and_belong_to_their_labels():
    batch = packed_batch([[token_row(9, 1), token_row(7, 2)], [token_row(16, 3)]])
    head, hidden_BTD = Head(build_hf("llama"), HeadKind("plain")), torch.randn(2, 16, 64)
    found = head(hidden_BTD, batch.labels_BT)
    on_device = batch.to("cpu").with_columns(rewards_BT=torch.ones(2, 16))
    keywords = on_device.head_inputs()
    with _Operators() as operators:
        got = head(hidden_BTD, on_device.labels_BT, label_positions_S=keywords["label_positions"])
    assert torch.equal(got.logprobs_BT, found.logprobs_BT) and "nonzero" not in operators.names
    other = replace(on_device, labels_BT=batch.labels_BT.roll(1, 0))
    assert other.label_positions_S is None
    where = (other.labels_BT.flatten() != IGNORE_INDEX).nonzero()[:, 0]
    assert torch.equal(other.to("cpu").label_positions_S, where)


@pytest.mark.parametrize("kind", ["plain", "generic"])
def test_a_microbatch_without_labels_still_gives_every_parameter_a_gradient(kind: str):
    model = build_hf("llama")
    hidden = torch.randn(1, 4, 64, requires_grad=True)
    logprobs = Head(model, HeadKind(kind))(hidden, torch.full((1, 4), IGNORE_INDEX)).logprobs_BT  # type: ignore[arg-type]
    assert logprobs.tolist() == [[0.0] * 4]
    logprobs.sum().backward()
    assert hidden.grad is not None and not hidden.grad.any()
    assert model.lm_head.weight.grad is not None and not model.lm_head.weight.grad.any()


def test_a_head_with_a_bias_takes_the_generic_path():
    model = build_hf("llama")
    model.lm_head = nn.Linear(64, 160, bias=True)
    hidden, labels = torch.randn(1, 6, 64), torch.randint(0, 160, (1, 6))
    logprobs = Head(model, HeadKind("plain"), chunk_size=4)(hidden, labels).logprobs_BT
    assert torch.allclose(logprobs, reference_logprobs(model.lm_head(hidden), labels), atol=2e-6)
    assert torch.equal(head_logits(model, hidden), model.lm_head(hidden))
