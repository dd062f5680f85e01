"""What TRL's own code says of given numbers, for tests/vectors/trl.json.

    pip install trl==1.16.0 && python scripts/trl_vectors.py > tests/vectors/trl.json

Every value comes out of a method or function of TRL; only what stands around it (models that answer with given logits,
accelerators that gather from one process) is made here. Nothing but this script needs TRL.
"""

from __future__ import annotations

import json
from collections import defaultdict
from types import SimpleNamespace as Stub
from typing import Any

import torch
from torch import Tensor

ACCELERATOR = Stub(gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, *_: x, num_processes=1)


def reward() -> list[dict[str, Any]]:
    """`RewardTrainer.compute_loss`: pairs of scores with and without margins, and a centre."""
    from trl import RewardTrainer

    torch.manual_seed(0)
    cases = []
    for margin in (False, True):
        for center in (0.0, 0.05):
            scores_2P = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
            margins_P = torch.rand(5, dtype=torch.float64)
            trainer = Stub(
                model=Stub(training=False),
                args=Stub(center_rewards_coefficient=center or None),
                accelerator=ACCELERATOR,
                _total_train_tokens=0,
                _metrics={"eval": defaultdict(list)},
            )
            inputs = {"margin": margins_P} if margin else {}

            def model(of: Tensor = scores_2P, **_: Any) -> Any:
                return Stub(logits=of.flatten()[:, None])

            loss = RewardTrainer.compute_loss(trainer, model, inputs)
            loss.backward()
            assert scores_2P.grad is not None
            cases.append(
                {
                    "margin": margin,
                    "center": center,
                    "scores_2P": scores_2P.tolist(),
                    "margins_P": margins_P.tolist(),
                    "loss": loss.item(),
                    "gradient_2P": scores_2P.grad.tolist(),
                    "accuracy": trainer._metrics["eval"]["accuracy"][0],
                }
            )
    return cases


def distillation() -> list[dict[str, Any]]:
    """`GKDTrainer.generalized_jsd_loss` on a vocabulary of 6, with two ignored labels."""
    from trl.experimental.gkd import GKDTrainer

    torch.manual_seed(1)
    cases = []
    for beta in (0.0, 0.3, 0.5, 1.0):
        student_BTV, teacher_BTV = (torch.randn(2, 4, 6, dtype=torch.float64) * 2 for _ in range(2))
        labels_BT = torch.tensor([[-100, 3, 1, 2], [0, 5, -100, 4]])
        student_BTV.requires_grad_()
        loss = GKDTrainer.generalized_jsd_loss(student_BTV, teacher_BTV, labels_BT, beta=beta)
        loss.backward()
        cases.append(
            {
                "beta": beta,
                "student_BTV": student_BTV.tolist(),
                "teacher_BTV": teacher_BTV.tolist(),
                "labels_BT": labels_BT.tolist(),
                "loss": loss.item(),
                "gradient_BTV": student_BTV.grad.tolist(),
            }
        )
    return cases


def preference() -> dict[str, Any]:
    """`DPOTrainer._compute_loss` of five pairs over a vocabulary of 4: losses that sort, and WPO's weights."""
    from trl import DPOTrainer

    cases = []
    for loss_type, smoothing, wpo in (
        ("aot", 0.0, False),
        ("aot", 0.1, False),
        ("aot_unpaired", 0.0, False),
        ("aot_unpaired", 0.1, False),
        ("sigmoid", 0.0, True),
        ("bco_pair", 0.0, True),
    ):
        torch.manual_seed(3)
        logits_RTV = torch.randn(10, 4, 4, dtype=torch.float64).mul(2).requires_grad_()
        labels_RT = torch.randint(0, 4, (10, 4))
        mask_RT = torch.arange(5) < torch.tensor([3, 5, 4, 5, 2, 5, 4, 2, 3, 5])[:, None]
        mask_RT[:, 0] = False  # the first token is the prompt
        logp_RTV = logits_RTV.log_softmax(-1)
        drawn_RT = logp_RTV.gather(-1, labels_RT[..., None])[..., 0] * mask_RT[:, 1:]
        ref_RT = (drawn_RT.detach() + torch.randn(10, 4, dtype=torch.float64)) * mask_RT[:, 1:]
        outputs = Stub(
            log_probs=drawn_RT,
            log_sum_sq_probs=(2 * logp_RTV).logsumexp(-1),
            entropy=torch.zeros_like(drawn_RT),
            mean_logits=torch.zeros_like(drawn_RT),
            is_top1=mask_RT[:, 1:],
        )
        trainer = Stub(
            model=Stub(training=False),
            accelerator=Stub(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
            aux_loss_enabled=False,
            ld_alpha=None,
            precompute_ref_logps=True,
            f_divergence_type="reverse_kl",
            loss_types=[loss_type],
            loss_weights=[1.0],
            beta=0.3,
            label_smoothing=smoothing,
            use_weighting=wpo,
            _metrics={"eval": defaultdict(list)},
            _total_train_tokens=0,
            _tp_size=1,
        )
        inputs = {
            "input_ids": torch.zeros(10, 5, dtype=torch.int64),
            "completion_mask": mask_RT.long(),
            "ref_chosen_logps": ref_RT[:5].sum(1),
            "ref_rejected_logps": ref_RT[5:].sum(1),
        }
        loss = DPOTrainer._compute_loss(trainer, lambda outputs=outputs, **_: outputs, inputs, False)
        loss.backward()
        assert logits_RTV.grad is not None
        cases.append(
            {
                "loss": loss_type,
                "label_smoothing": smoothing,
                "wpo": wpo,
                "value": loss.item(),
                "gradient_RTV": logits_RTV.grad.tolist(),
            }
        )
    given = {"logits_RTV": logits_RTV, "labels_RT": labels_RT, "mask_RT": mask_RT.long(), "ref_RT": ref_RT}
    return {"given": {name: tensor.tolist() for name, tensor in given.items()}, "cases": cases}


def high_entropy() -> list[dict[str, Any]]:
    """`GRPOTrainer.get_high_entropy_mask` of nine responses of these lengths."""
    from trl import GRPOTrainer

    torch.manual_seed(2)
    lengths = [2, 5, 3, 4, 7, 5, 8, 6, 9]
    mask_NT = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    trainer = Stub(accelerator=Stub(gather=lambda x: x, pad_across_processes=lambda x, **_: x))
    cases = []
    for share in (0.2, 0.5):
        entropies_NT = torch.rand(mask_NT.shape) * 3
        chosen_NT = GRPOTrainer.get_high_entropy_mask(trainer, entropies_NT, mask_NT, 1 - share)
        pairs = list(zip(entropies_NT.tolist(), chosen_NT.tolist(), lengths, strict=True))
        cases.append(
            {
                "share": share,
                "entropies": [row[:length] for row, _, length in pairs],
                "chosen": [row[:length] for _, row, length in pairs],
            }
        )
    return cases


if __name__ == "__main__":
    import trl

    kinds = {"reward": reward, "distillation": distillation, "high_entropy": high_entropy, "preference": preference}
    made = {"trl": trl.__version__, **{name: cases() for name, cases in kinds.items()}}
    print(json.dumps(made))
