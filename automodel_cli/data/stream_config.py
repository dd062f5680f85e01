"""The `data.streaming:` section of a config."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_range

MOST_LANES = 32
"""Lanes by default. Each has an open file and two blocks of rows in memory."""


@dataclass(frozen=True)
class StreamConfig:
    """Read, tokenize and pack rows while the run trains.

    The order of the sequences depends on `lanes`, `block_rows` and `seed`, but not on the number of ranks. A lane is a
    fixed part of the files. Each data-parallel rank reads its own lanes.
    """

    lanes: int | None = None
    """Number of lanes: a divisor of `train.global_batch_size`, and a multiple of the number of data-parallel ranks.
    null: the largest divisor up to 32."""
    block_rows: int = 256
    """Rows of a lane that are tokenized, packed and shuffled together. A rank holds two blocks of each of its
    lanes."""
    num_threads: int = 4
    """Threads of a rank that read and tokenize."""

    def __post_init__(self) -> None:
        check_range("lanes", self.lanes, at_least=1)
        check_range("block_rows", self.block_rows, at_least=1)
        check_range("num_threads", self.num_threads, at_least=1)

    def num_lanes(self, batch_sizes: Sequence[int]) -> int:
        """Return the number of lanes for steps of these sizes. Raises ConfigError if it does not divide them."""
        common = math.gcd(*batch_sizes)
        divisors = [n for n in range(1, common + 1) if common % n == 0]
        if self.lanes is None:
            return max(n for n in divisors if n <= MOST_LANES)
        if common % self.lanes:
            near = max(n for n in divisors if n <= self.lanes)
            raise ConfigError(
                f"data.streaming.lanes={self.lanes} does not divide {common}, the sequences of a step",
                code="not_divisible",
                keys=("data.streaming.lanes", "train.global_batch_size"),
                fix=f"data.streaming.lanes={near}",
            )
        return self.lanes

    def check_ranks(self, batch_sizes: Sequence[int], dp_size: int) -> None:
        """Raise ConfigError if the lanes cannot be divided among the data-parallel ranks."""
        lanes, common = self.num_lanes(batch_sizes), math.gcd(*batch_sizes)
        if lanes % dp_size:
            fitting = [n for n in range(dp_size, common + 1, dp_size) if common % n == 0]
            raise ConfigError(
                f"data.streaming has {lanes} lanes, not a multiple of the {dp_size} data-parallel ranks",
                code="not_divisible",
                keys=("data.streaming.lanes", "train.global_batch_size"),
                fix=f"data.streaming.lanes={fitting[0]}" if fitting else f"train.global_batch_size={8 * dp_size}",
            )
