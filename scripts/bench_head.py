"""Is the chunked head as fast as plain cross-entropy on full logits? Forward and backward, interleaved, minimum of
repeats.

    python scripts/bench_head.py [--tokens 2048] [--vocab 49152] [--hidden 256] [--repeats 5] [--chunk N]

Prints milliseconds of CPU time (all threads together, so that a busy machine matters less) and peak extra memory per
run (Linux, from /proc/self/status, CPU only), with all tokens supervised and with half of them.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F
from torch import Tensor

from automodel_cli.data.batch import IGNORE_INDEX
from automodel_cli.models.lm_head.fused_linear_logprobs import fused_scores
from automodel_cli.models.lm_head.head import default_chunk_size
from automodel_cli.models.lm_head.scores import HeadKind, Settings


def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.t()).float(), labels, ignore_index=IGNORE_INDEX, reduction="sum")


def chunked(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> Tensor:
    index = (labels != IGNORE_INDEX).nonzero()[:, 0]
    scores = fused_scores(hidden[index], weight, labels[index, None], Settings(HeadKind("plain"), chunk))
    return -scores.logprobs_SN.sum()


def peak_mib() -> float:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM"))


def reset_peak() -> None:
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 2048), ("vocab", 49152), ("hidden", 256), ("repeats", 5), ("chunk", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden, requires_grad=True)
    weight = (torch.randn(args.vocab, args.hidden) * 0.02).requires_grad_()
    chunk = args.chunk or default_chunk_size(args.vocab, hidden.device)
    print(
        f"{args.tokens} tokens, hidden {args.hidden}, vocabulary {args.vocab}, {torch.get_num_threads()} threads, "
        f"chunks of {chunk}"
    )
    for share in (1.0, 0.5):
        labels = torch.randint(0, args.vocab, (args.tokens,))
        labels[torch.rand(args.tokens) >= share] = IGNORE_INDEX
        best: dict[str, float] = {}
        peak: dict[str, float] = {}
        for _ in range(args.repeats):
            for name in ("plain", "chunked"):
                hidden.grad = weight.grad = None
                reset_peak()
                before, start = peak_mib(), time.process_time()
                loss = plain(hidden, weight, labels) if name == "plain" else chunked(hidden, weight, labels, chunk)
                loss.backward()
                elapsed = (time.process_time() - start) * 1e3
                best[name], peak[name] = min(best.get(name, elapsed), elapsed), peak_mib() - before
                del loss
        print(
            f"supervised {share:4.0%}: plain {best['plain']:7.0f} ms {peak['plain']:6.0f} MiB   "
            f"chunked {best['chunked']:7.0f} ms {peak['chunked']:6.0f} MiB"
            f"   ratio {best['chunked'] / best['plain']:.2f}"
        )


if __name__ == "__main__":
    main()
