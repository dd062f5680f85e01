"""Shares of the tokens at every position, passes, curricula, and three epochs on several layouts with kills."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from automodel_cli.config.errors import RunError
from automodel_cli.data.mixture import Mixture
from automodel_cli.data.preparation.dataloader import BatchLoader
from automodel_cli.data.preparation.row_stream import TokenBlend, row_stream
from tests.errors import raises

SHARES = (0.5, 0.2, 0.3)


def lengths(*sizes: int, longest: int = 100) -> list[np.ndarray]:
    """Uneven sequences: a dataset's last ones are as long as the first are short."""
    random = np.random.default_rng(0)
    return [random.integers(1, longest + 1, size) for size in sizes]


def blend(*phases: tuple[int, tuple[float, ...]]) -> Mixture:
    number = len(phases[0][1])
    return Mixture(tuple(f"d{i}" for i in range(number)), (1.0,) * number, (1.0,) * number, phases)


def stream(of: list[np.ndarray], mixture: Mixture, shuffle: bool = True):
    return row_stream(of, mixture, seed=3, shuffle=shuffle, rows_per_step=10)


def drawn(of: list[np.ndarray], rows: np.ndarray) -> np.ndarray:
    """Tokens of each dataset (column) in each row of the stream."""
    first = np.cumsum([0, *map(len, of)])
    sources = np.searchsorted(first, rows, side="right") - 1
    return np.where(sources[:, None] == np.arange(len(of)), np.concatenate(of)[rows][:, None], 0)


def test_equal_sequences_by_hand():
    """Sequences of 4 tokens, shares 3/4 and 1/4: due at 2.67, 8, 13.3, ... and at 8, 24, ... tokens of the run."""
    of = [np.full(6, 4), np.full(2, 4)]
    assert stream(of, blend((0, (0.75, 0.25))), shuffle=False).rows(0, 8).tolist() == [0, 1, 6, 2, 3, 4, 7, 5]


@pytest.mark.parametrize("shares", [SHARES, (0.98, 0.01, 0.01), (1 / 3, 1 / 3, 1 / 3)])
def test_shares_are_exact_at_every_position(shares):
    of = lengths(500, 30, 2000)
    tokens = drawn(of, stream(of, blend((0, shares))).rows(0, 40_000)).cumsum(0)
    total = tokens.sum(1)
    off = np.abs(tokens - total[:, None] * np.array(shares)).max(1)
    assert off.max() < 100  # the longest sequence
    assert (off / total)[2000:].max() < 0.001


def test_each_dataset_is_used_up_before_a_sequence_repeats_and_each_pass_has_its_own_order():
    of = lengths(40, 7, 90)
    rows = stream(of, blend((0, SHARES))).rows(0, 2000)
    for first, size in ((0, 40), (40, 7), (47, 90)):
        mine = rows[(rows >= first) & (rows < first + size)]
        passes = mine[: len(mine) // size * size].reshape(-1, size)
        assert (np.sort(passes, 1) == np.arange(first, first + size)).all()
        assert len({tuple(one) for one in passes.tolist()}) == len(passes) > 2


def test_any_part_can_be_read_in_any_order():
    of, mixture = lengths(300, 20, 900), blend((0, SHARES), (300, (0.0, 0.9, 0.1)), (2000, (0.5, 0.5, 0.0)))
    whole = stream(of, mixture).rows(0, 30_000)
    other = stream(of, mixture)
    for start in (29_000, 0, 2990, 20_010, 4090, 19_999, 8000):
        assert (other.rows(start, 500) == whole[start : start + 500]).all()
    assert isinstance(other, TokenBlend) and len(other._chunks) <= 4


def test_a_curriculum_has_the_shares_of_each_phase():
    """10 sequences a step: the phases begin at the sequences 0, 5,000 and 20,000."""
    of, phases = lengths(500, 30, 2000), ((0, SHARES), (500, (0.1, 0.0, 0.9)), (2000, (0.0, 1.0, 0.0)))
    rows = stream(of, blend(*phases)).rows(0, 40_000)
    for (first, shares), last in zip(phases, (500, 2000, 4000), strict=True):
        tokens = drawn(of, rows[first * 10 : last * 10]).sum(0)
        assert np.abs(tokens / tokens.sum() - shares).max() < 0.001
    plain = stream(of, blend((0, SHARES))).rows(0, 5000)
    assert (rows[:5000] == plain).all()


def test_an_epoch_of_shares_has_as_many_tokens_as_all_datasets():
    of = lengths(500, 30, 2000)
    made = stream(of, blend((0, SHARES)))
    assert drawn(of, made.rows(0, made.rows_per_epoch)).sum() == pytest.approx(sum(map(np.sum, of)), rel=0.01)


# -- three epochs on several layouts, killed and resumed


class Numbered:
    """Sequences that are their own numbers."""

    contents = (("a", "0"), ("b", "0"), ("c", "0"))

    def __init__(self, of: list[np.ndarray], mixture: Mixture):
        self.first_rows, self.row_lengths = np.cumsum([0, *map(len, of)]), np.concatenate(of)
        self.mixture = mixture

    def collate(self, row_indices) -> list[int]:
        return [int(row) for row in row_indices]


OF = lengths(60, 14, 90)
MIXTURES = {
    "epochs": Mixture(("a", "b", "c"), (1.0, 2.0, 0.5), (1.0,) * 3),
    "shares": blend((0, SHARES)),
    "curriculum": blend((0, SHARES), (7, (0.1, 0.8, 0.1))),
}


def loader(mixture: Mixture, rank: int, size: int, microbatch: int) -> BatchLoader:
    options = {"global_batch_size": 8, "microbatch_size": microbatch, "seed": 5}
    return BatchLoader(Numbered(OF, mixture), dp_rank=rank, dp_size=size, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("layouts", [[(2, 1)], [(4, 2)], [(1, 2), (2, 4), (4, 1), (2, 2)]], ids=["2", "4", "changing"])
def test_three_epochs_have_the_same_steps_on_any_layout_with_kills(name, layouts):
    """Every fourth step all ranks are lost: new ones load the state, as JSON, and repeat what was not saved."""
    mixture = MIXTURES[name]
    alone = loader(mixture, 0, 1, 8)
    num_steps = 3 * alone.steps_per_epoch
    want = [sorted(alone.next_step()[0]) for _ in range(num_steps)]
    state = json.dumps(loader(mixture, 0, 1, 1).state_dict())
    got: list[list[int]] = []
    for size, microbatch in itertools.cycle(layouts):
        ranks = [loader(mixture, rank, size, microbatch) for rank in range(size)]
        for one in ranks:
            one.load_state_dict(json.loads(state))
        for _ in range(4):
            got.append(sorted(row for one in ranks for batch in one.next_step() for row in batch))
            if len(got) == num_steps:
                break
        states = [json.dumps(one.state_dict()) for one in ranks]
        assert len(set(states)) == 1
        if len(got) == num_steps:
            break
        state = states[0]
        ranks[0].next_step()  # a step after the checkpoint, which is lost
    assert got == want
    assert ranks[0].token_shares() == alone.token_shares()
    if name == "epochs":  # 3 epochs: 3, 6 and 1.5 passes
        counts = np.bincount([row for step in got for row in step][: 3 * alone.stream.rows_per_epoch], minlength=164)
        assert set(counts[:60]) == {3} and set(counts[60:74]) == {6} and set(counts[74:]) == {1, 2}
        assert counts[74:].sum() == 3 * 45


def test_weights_of_steps_that_are_not_done_may_change_at_a_resume():
    state = loader(MIXTURES["curriculum"], 0, 1, 8).state_dict()
    for steps, later, fits in ((5, 7, True), (7, 9, True), (8, 9, False)):
        run = loader(MIXTURES["curriculum"], 0, 1, 8)
        for _ in range(steps):
            run.next_step()
        state = json.loads(json.dumps(run.state_dict()))
        resumed = loader(blend((0, SHARES), (later, (0.0, 0.0, 1.0))), 0, 1, 8)
        if fits:
            resumed.load_state_dict(state)
            assert resumed.position == steps * 8
        else:
            with raises(RunError, "checkpoint_mismatch", keys=("data",), values=("mixture",)):
                resumed.load_state_dict(state)
