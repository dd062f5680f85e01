"""Clusters of duplicates against Jaccard similarities of all pairs, computed from sets of words."""

from __future__ import annotations

import itertools
import random
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("rensa")

from automodel_cli.data.quality.duplicates import Signatures, bands_for, exact_clusters, near_clusters
from automodel_cli.data.quality.row_features import NUM_HASHES, FeatureReader
from automodel_cli.data.quality.row_text import RowText
from automodel_cli.data.row_errors import SourceRow
from automodel_cli.data.source_config import SourceConfig


def texts_with_copies() -> list[str]:
    """30 texts of 120 words, and 3 copies of each, of which every 4th, 30th or 100th word is another one."""
    chosen = random.Random(0)
    words = [f"w{n}" for n in range(5000)]
    texts = [[chosen.choice(words) for _ in range(120)] for _ in range(30)]
    for text in list(texts):
        for rate in (4, 30, 100):
            texts.append([chosen.choice(words) if chosen.randrange(rate) == 0 else word for word in text])
    return [" ".join(text) for text in texts]


def jaccard(a: str, b: str) -> float:
    """Of the sets of 5 consecutive words."""
    sets = []
    for text in (a, b):
        words = re.findall(r"\w+", text.lower())
        sets.append({tuple(words[i : i + 5]) for i in range(len(words) - 4)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def signatures_of(texts: list[str], folder: Path) -> Signatures:
    rows = [SourceRow(0, n, {"text": text}) for n, text in enumerate(texts, 1)]
    reader = FeatureReader(RowText(SourceConfig("x"), [{"text": ""}], "x"), frozenset({"near"}), None, folder)
    return Signatures(reader.read(rows, "s").signatures)


def test_equal_hashes_estimate_the_jaccard_similarity(tmp_path: Path) -> None:
    texts = texts_with_copies()
    pairs = [(a, b) for a, b in itertools.combinations(range(len(texts)), 2) if jaccard(texts[a], texts[b])]
    assert len(pairs) > 100
    made = signatures_of(texts, tmp_path)
    first, second = (made.take(np.array(rows)) for rows in zip(*pairs, strict=True))
    want = np.array([jaccard(texts[a], texts[b]) for a, b in pairs])
    error = (first == second).mean(1) - want
    assert np.all(abs(error) <= 4.5 * np.sqrt(want * (1 - want) / NUM_HASHES) + 1e-9)
    assert abs(error.mean()) < 0.01  # unbiased


@pytest.mark.parametrize("similarity", [0.6, 0.8, 0.9])
def test_clusters_are_those_of_all_pairs(similarity: float, tmp_path: Path) -> None:
    texts = texts_with_copies()
    clusters = near_clusters(signatures_of(texts, tmp_path), np.arange(len(texts)), similarity, len(texts))
    assert np.all(clusters <= np.arange(len(texts))) and np.all(clusters[clusters] == clusters)
    noise = 3 * np.sqrt(similarity * (1 - similarity) / NUM_HASHES)
    linked = {n: {n} for n in range(len(texts))}  # connected by pairs that may be found
    for a, b in itertools.combinations(range(len(texts)), 2):
        found = jaccard(texts[a], texts[b])
        if found >= min(1, similarity + noise):
            assert clusters[a] == clusters[b], (a, b, found)
        if found >= similarity - noise:
            linked[a].add(b)
            linked[b].add(a)
    for row, cluster in enumerate(clusters.tolist()):
        reached, new = {row}, {row}
        while new:
            new = set().union(*(linked[n] for n in new)) - reached
            reached |= new
        assert cluster in reached
    assert len(set(clusters.tolist())) < len(texts)


@pytest.mark.parametrize("similarity", [0.5, 0.8, 0.95])
def test_bands_make_pairs_with_this_similarity_candidates(similarity: float) -> None:
    number, size = bands_for(similarity)
    assert number * size <= NUM_HASHES
    equal = np.random.default_rng(0).random((20_000, number, size)) < similarity
    rate = equal.all(2).any(1).mean()
    assert rate >= 0.945 and (size == NUM_HASHES or rate < 0.999)


def test_exact_clusters_are_those_of_a_dictionary() -> None:
    digests = np.random.default_rng(1).integers(0, 3, (200, 2)).astype(np.uint64)
    first: dict[tuple[int, ...], int] = {}
    want = [first.setdefault(tuple(digest), n) for n, digest in enumerate(digests.tolist())]
    assert exact_clusters(digests).tolist() == want
