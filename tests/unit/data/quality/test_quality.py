"""Results of all checks together: shards and processes, kinds of rows, and which rows stay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("rensa")
pytest.importorskip("py3langid")

from automodel_cli.config.errors import ConfigError, DataError
from automodel_cli.data.quality.clean import check_readable, write_clean
from automodel_cli.data.quality.options import CHECKS, QualityOptions, choose_checks
from automodel_cli.data.quality.overlap import build_index
from automodel_cli.data.quality.quality import Quality, measure
from automodel_cli.data.quality.report import report_lines, report_of
from automodel_cli.data.row_errors import SourceRow
from automodel_cli.data.source_config import SourceConfig
from automodel_cli.data.sources import spans
from automodel_cli.data.sources.sources import open_source
from tests.errors import raises
from tests.unit.data.helpers import chat_row, write_jsonl

LONG = " ".join(f"word{n}" for n in range(60))
GERMAN = "Die Katze liegt auf dem Sofa und schläft, während der Hund draußen im Garten spielt."
ENGLISH = "The cat lies on the sofa and sleeps, while the dog plays outside in the garden of the house."
QUESTION = "How many clips did she sell altogether in April and in May of this year and the last one"
WITHOUT = QualityOptions(("exact", "near", "language", "length"))


def measured(
    folder: Path, files: list[Path], options: QualityOptions = WITHOUT, *, against: Any = None, workers: int = 0
) -> Quality:
    opened = [(SourceConfig(str(path)), open_source(SourceConfig(str(path)), folder)) for path in files]
    index = None if against is None else build_index([("eval", ["e.jsonl"], [SourceRow(0, 1, against)])], options.ngram)
    work = folder / "work"
    work.mkdir(exist_ok=True)
    return measure(opened, options, index, folder=work, choose_workers=lambda _: workers, show=lambda line: None)


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_shards_give_the_report_of_one_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = [{"text": f"{n % 7} {LONG} {n % 3}"} for n in range(60)]
    rows[20] = "{broken"
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    whole = report_of(measured(tmp_path, [path]))
    assert whole["exact"]["num_rows"] == 59 - 21 and whole["invalid"]["examples"][0]["row"] == "a.jsonl:21"
    monkeypatch.setattr(spans, "SHARD_BYTES", 3000)
    assert len(open_source(SourceConfig(str(path)), tmp_path).shards()) > 5  # type: ignore[attr-defined]
    assert report_of(measured(tmp_path, [path])) == whole


@pytest.mark.slow
def test_processes_give_the_report_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "SHARD_BYTES", 1000)
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"{n % 7} {ENGLISH}"} for n in range(40)])
    assert report_of(measured(tmp_path, [path], workers=2)) == report_of(measured(tmp_path, [path]))


@pytest.mark.parametrize(
    ("row", "other", "same"),
    [
        ({"text": LONG, "id": 1}, {"text": LONG, "id": 2}, True),
        (chat_row("a question", "an answer"), chat_row("a question", "an answer"), True),
        (chat_row("a question", "an answer"), chat_row("a", "question an answer"), False),
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "p", "chosen": "a", "rejected": "c"}, False),
        ({"prompt": "p", "completion": "a", "label": True}, {"prompt": "p", "completion": "a", "label": True}, True),
        ({"query": "q", "positive": "p", "negative": "n"}, {"query": "q", "positive": "p", "negative": "n"}, True),
        ({"instruction": "p", "output": "a"}, {"instruction": "p", "output": "a", "source": "x"}, True),
    ],
)
def test_exact_duplicates_have_the_same_roles_and_texts(row: dict, other: dict, same: bool, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [row, other])
    quality = measured(tmp_path, [path], QualityOptions(("exact",)))
    assert not quality.invalid and quality.repeats("exact").tolist() == [False, same]


def test_removed_rows_have_their_reasons_and_the_others_stay_as_they_are(tmp_path: Path) -> None:
    first = [
        {"text": LONG, "id": 0},
        {"text": GERMAN},
        {"text": f"{LONG} more"},
        {"text": "too short"},
        {"text": ENGLISH},
    ]
    second: list[Any] = [{"text": LONG}, "[1]", {"text": f"Q: {QUESTION}?"}, {"text": "What a day it is in the park"}]
    paths = [write_jsonl(tmp_path / "a.jsonl", first), write_jsonl(tmp_path / "b.jsonl", second)]
    options = QualityOptions(CHECKS, ("invalid", *CHECKS), similarity=0.7, languages=("en", "unknown"), min_words=3)
    quality = measured(tmp_path, paths, options, against={"question": QUESTION})
    done = write_clean(quality, ["a", "b"], tmp_path / "clean", ".jsonl")
    kept = [*lines(tmp_path / "clean" / "a.jsonl"), *lines(tmp_path / "clean" / "b.jsonl")]
    removed = {row["row"]: row for row in lines(tmp_path / "clean" / "removed.jsonl")}
    assert {where: row["reasons"] for where, row in removed.items()} == {
        "a.jsonl:2": ["language"],
        "a.jsonl:3": ["near"],
        "a.jsonl:4": ["length"],
        "b.jsonl:1": ["exact"],
        "b.jsonl:2": ["invalid"],
        "b.jsonl:3": ["overlap"],
    }
    assert kept == [first[0], first[4], second[3]]
    assert removed["a.jsonl:3"]["cluster"] == removed["b.jsonl:1"]["cluster"] == "a.jsonl:1"
    assert (removed["a.jsonl:2"]["language"], removed["b.jsonl:3"]["evaluation"]) == ("de", "e.jsonl:1")
    assert done["kept"] == {"a.jsonl": 2, "b.jsonl": 1} and sum(done["removed"].values()) == 6
    assert removed["b.jsonl:3"]["content"] == second[2]
    again = measured(tmp_path, [tmp_path / "clean" / "a.jsonl", tmp_path / "clean" / "b.jsonl"])
    assert not again.repeats("near").any() and not again.repeats("exact").any()


def test_of_a_cluster_the_first_row_without_another_reason_stays(tmp_path: Path) -> None:
    rows = [{"text": LONG}, {"text": LONG}, {"text": f"{LONG} one more"}, {"text": f"{LONG} one more"}]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    options = QualityOptions(("near", "length"), ("near", "length"), similarity=0.7, min_words=61)
    removals = measured(tmp_path, [path], options).removals()
    assert removals["length"].tolist() == [True, True, False, False]
    assert removals["exact"].tolist() == [False, False, False, True]  # the fourth equals the third, which stays
    assert not removals["near"].any()


def test_rows_that_cannot_be_read_are_not_dropped_silently(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": LONG}, "{", {"text": 3}])
    with raises(DataError, "bad_rows", keys=("--remove",), values=("a.jsonl:2",), fix="--remove invalid,exact"):
        check_readable(measured(tmp_path, [path], QualityOptions(("exact",), ("exact",))))
    check_readable(measured(tmp_path, [path], QualityOptions(("exact",), ("invalid", "exact"))))


def test_data_that_changes_between_the_passes_are_rejected(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": LONG}, {"text": ENGLISH}])
    quality = measured(tmp_path, [path], QualityOptions(("exact",), ("exact",)))
    write_jsonl(path, [{"text": LONG}, {"text": ENGLISH}, {"text": GERMAN}])
    with raises(DataError, "invalid_data", values=("a.jsonl:3",)):
        write_clean(quality, ["a"], tmp_path / "clean", ".jsonl")
    write_jsonl(path, [{"text": LONG}])
    with raises(DataError, "invalid_data"):
        write_clean(quality, ["a"], tmp_path / "clean", ".jsonl")
    assert not (tmp_path / "clean").exists()


def test_the_report_counts_languages_and_lengths(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": ENGLISH}, {"text": GERMAN}, {"text": GERMAN + " Ja."}])
    options = QualityOptions(("language", "length"), languages=("en",), max_words=15)
    report = report_of(measured(tmp_path, [path], options))
    assert {name: of["num_rows"] for name, of in report["language"]["languages"].items()} == {"de": 2, "en": 1}
    assert report["language"]["num_rows"] == 2
    words = [len(row["text"].split()) for row in lines(path)]
    assert report["length"]["quantiles"]["0.5"] == int(np.median(words))
    assert report["length"]["num_rows"] == sum(number > 15 for number in words) == 2
    assert report["num_bytes"] == sum(len(row["text"].encode()) for row in lines(path))
    assert any(line.startswith("language") for line in report_lines(report))


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"similarity": 1.5}, "out_of_range"),
        ({"overlap": -1}, "out_of_range"),
        ({"ngram": 1}, "out_of_range"),
        ({"remove": ("language",)}, "requires_setting"),
        ({"remove": ("length",)}, "requires_setting"),
        ({"remove": ("overlap",)}, "requires_setting"),
    ],
)
def test_settings_that_do_not_fit_are_rejected(options: dict, code: str) -> None:
    with raises(ConfigError, code):
        QualityOptions(**{"checks": ("exact", "language", "length"), **options})


def test_overlap_needs_evaluations() -> None:
    assert choose_checks(None, True) == CHECKS
    assert "overlap" not in choose_checks(None, False)
    for checks, has_evaluations in (("overlap",), False), (("exact",), True):
        with raises(ConfigError, "requires_setting"):
            choose_checks(checks, has_evaluations)
