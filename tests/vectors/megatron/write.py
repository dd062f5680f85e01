"""Write the token files in this folder with megatron-core's own code: python tests/vectors/megatron/write.py [FOLDER].

Written by megatron-core 0.16.1. A document is a list of sequence lengths.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCUMENTS = [[5], [3, 4], [1], [12], [2], [30, 1]]
DTYPES = ("uint16", "int32")


def tokens(number: int) -> list[int]:
    """Tokens of a document, 10 to 289."""
    return [(37 * number + 11 * i) % 280 + 10 for i in range(sum(DOCUMENTS[number]))]


def write(folder: Path) -> None:
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for name in DTYPES:
        builder = IndexedDatasetBuilder(str(folder / f"{name}_text_document.bin"), dtype=getattr(np, name))
        for number, lengths in enumerate(DOCUMENTS):
            builder.add_document(torch.tensor(tokens(number)), lengths)
        builder.finalize(str(folder / f"{name}_text_document.idx"))


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
