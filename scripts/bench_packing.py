"""Documents per second and fill of the packer: `python scripts/bench_packing.py [--documents N] [--repeats N]`.

Two sets: log-normal lengths (mean 351, median 212 tokens; long ones split), and a hard one (uniform in 0.2 to 0.7 of a
row). Index only is the assignment of documents to rows; written also gathers tokens and masks and writes them to files.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from automodel_cli.data.packing import Packed, cut_long, pack
from automodel_cli.data.storage.memmap_store import TokenStore
from automodel_cli.data.storage.memmap_writer import write_packed


def log_normal(number: int) -> np.ndarray:
    """Lengths with mean 351 and median 212."""
    sigma = np.sqrt(2 * np.log(351 / 212))
    return np.maximum(1, np.random.default_rng(0).lognormal(np.log(212), sigma, number)).astype(np.int64)


def uniform(number: int, seq_len: int) -> np.ndarray:
    """Lengths of which two or three share a row."""
    return np.random.default_rng(0).integers(int(0.2 * seq_len), int(0.7 * seq_len) + 1, number)


def token_store(lengths: np.ndarray) -> TokenStore:
    """Random tokens in memory; a run reads them through a memory map that the operating system has cached."""
    rng = np.random.default_rng(1)
    total, number = int(lengths.sum()), len(lengths)
    return TokenStore(
        folder=Path(),
        meta={"dtype": "uint16", "files": ["random"]},
        ids=rng.integers(0, 2**16, total, np.uint16),
        label_mask=rng.integers(0, 2, total, np.uint8),
        offsets=np.concatenate([[0], np.cumsum(lengths)]),
        files=np.zeros(number, np.int32),
        lines=np.arange(number),
        rows=np.arange(number),
        shared=np.zeros(number, np.int64),
    )


def fastest(repeats: int, function: Callable[[], object]) -> float:
    """Seconds of the fastest call: other programs only ever slow a call down."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def measure(name: str, lengths: np.ndarray, seq_len: int, packing: str, repeats: int) -> None:
    """One line of the table."""

    def index() -> Packed:
        return pack(cut_long(lengths, seq_len, "split"), seq_len, packing)  # type: ignore[arg-type]

    store = token_store(lengths)
    folder = Path(tempfile.mkdtemp(prefix="bench_packing_"))
    try:
        both = fastest(repeats, lambda: write_packed(folder, store, index(), meta={}))
    finally:
        shutil.rmtree(folder)
    alone = fastest(repeats, index)
    fill = 100 * index().fill(seq_len)
    rates = f"{len(lengths) / alone:>12,.0f} {len(lengths) / both:>14,.0f}"
    print(f"{name:<12} {packing:<9} {seq_len:>7} {len(lengths):>9,} {rates} {fill:>8.2f}%")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print("set          packing   seq_len documents index docs/s written docs/s      fill")
    for seq_len in (2048, 4096):
        for packing in ("best_fit", "wrapped"):
            measure("log-normal", log_normal(args.documents), seq_len, packing, args.repeats)
    measure("hard uniform", uniform(args.documents // 5, 2048), 2048, "best_fit", args.repeats)


if __name__ == "__main__":
    main()
