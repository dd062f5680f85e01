"""The report of a `Quality` as an object of JSON values, and as lines of text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from automodel_cli.data.quality.quality import BYTES_PER_TOKEN, Quality

EXAMPLES = 5
"""Examples of each finding."""
Counts = Mapping[str, Any]
"""A part of the report: counts, names and further parts, as JSON values."""
_LARGEST = 4
_QUANTILES = (0.01, 0.05, 0.5, 0.95, 0.99)


def report_of(quality: Quality) -> dict[str, object]:
    """Return counts, estimated tokens and examples of every check."""
    everything = np.ones(len(quality.exact_R), bool)
    invalid = Counter(row.code for _, row in quality.invalid)
    report: dict[str, object] = {
        "datasets": [source.name for source in quality.sources],
        "num_rows": len(everything),
        "num_bytes": int(quality.size_R.sum()),
        "estimated_tokens": quality.num_tokens(everything),
        "invalid": {
            "num_rows": sum(invalid.values()),
            "codes": dict(invalid.most_common()),
            "examples": [
                {"row": f"{source.files[row.file]}:{row.line}", "code": row.code, "message": row.message}
                for source, row in quality.invalid[:EXAMPLES]
            ],
        },
    }
    found = {"exact": _exact, "near": _near, "overlap": _overlap, "language": _language, "length": _length}
    return {**report, **{check: found[check](quality) for check in quality.options.checks}}


def _exact(quality: Quality) -> dict[str, object]:
    return _clusters(quality, quality.exact_R, quality.repeats("exact"))


def _near(quality: Quality) -> dict[str, object]:
    repeats_R = quality.repeats("near")
    return {"similarity": quality.options.similarity, **_clusters(quality, quality.near_R, repeats_R)}


def _clusters(quality: Quality, clusters_R: np.ndarray, repeats_R: np.ndarray) -> dict[str, object]:
    """Return the clusters that contain one of these rows, the largest first."""
    firsts, sizes = np.unique(clusters_R, return_counts=True)
    here = np.isin(firsts, clusters_R[repeats_R])
    firsts, sizes = firsts[here], sizes[here]
    order = np.argsort(-sizes, kind="stable")[:EXAMPLES]
    sizes_found = Counter(sizes.tolist())
    return {
        **_counts(quality, repeats_R),
        "num_clusters": len(firsts),
        "cluster_sizes": {str(size): sizes_found[size] for size in sorted(sizes_found)},
        "examples": [
            {
                "size": int(sizes[i]),
                "rows": [quality.where(row) for row in np.flatnonzero(clusters_R == firsts[i])[:_LARGEST].tolist()],
            }
            for i in order.tolist()
        ],
    }


def _counts(quality: Quality, chosen_R: np.ndarray) -> dict[str, object]:
    return {"num_rows": int(chosen_R.sum()), "estimated_tokens": quality.num_tokens(chosen_R)}


def _overlap(quality: Quality) -> dict[str, object]:
    index, options = quality.index, quality.options
    assert index is not None, "the check overlap has evaluations"
    reached_U = np.zeros(len(index.sizes_U))
    for part in quality.features:
        for unit, coverage in part.reached.items():
            reached_U[unit] = max(reached_U[unit], coverage)
    evaluations = []
    for number, of_set in enumerate(index.sets):
        here = index.sets_U == number
        found = (reached_U > 0) & (np.float32(reached_U) >= np.float32(options.overlap))
        evaluations.append(
            {
                "name": of_set.name,
                "num_rows": len(of_set.origins),
                "num_not_compared": of_set.num_too_short,
                "num_found": len(np.unique(index.rows_U[here & found])),
                "num_with_common_ngram": len(np.unique(index.rows_U[here & (reached_U > 0)])),
            }
        )
    flagged_R, units_R, coverage_R = quality.flagged("overlap"), quality.column("unit"), quality.column("coverage")
    best = np.flatnonzero(flagged_R)[np.argsort(-coverage_R[flagged_R], kind="stable")][:EXAMPLES]
    return {
        "ngram": options.ngram,
        "threshold": options.overlap,
        **_counts(quality, flagged_R),
        "evaluations": evaluations,
        "examples": [
            {"row": quality.where(row), "evaluation": index.origin(unit), "coverage": round(coverage, 4)}
            for row, unit, coverage in zip(
                best.tolist(), units_R[best].tolist(), coverage_R[best].tolist(), strict=True
            )
        ],
    }


def _language(quality: Quality) -> dict[str, object]:
    language_R = quality.column("language")
    names, counts = np.unique(language_R, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    languages = {
        names[i].decode(): {
            **_counts(quality, language_R == names[i]),
            "example": quality.where(int(np.argmax(language_R == names[i]))),
        }
        for i in order.tolist()
    }
    others: dict[str, object] = {}
    if quality.options.languages:
        others = {"keep": list(quality.options.languages), **_counts(quality, quality.flagged("language"))}
    return {**others, "languages": languages}


def _length(quality: Quality) -> dict[str, object]:
    words_R, options = quality.column("words"), quality.options
    out: dict[str, object] = {}
    if options.min_words or options.max_words:
        flagged_R = quality.flagged("length")
        out = {
            "min_words": options.min_words,
            "max_words": options.max_words,
            **_counts(quality, flagged_R),
            "examples": [quality.where(row) for row in np.flatnonzero(flagged_R)[:EXAMPLES].tolist()],
        }
    if len(words_R):
        out["quantiles"] = {f"{q:g}": int(np.quantile(words_R, q, method="higher")) for q in _QUANTILES}
        ends = (("shortest", int(words_R.argmin())), ("longest", int(words_R.argmax())))
        out.update({name: {"words": int(words_R[row]), "row": quality.where(row)} for name, row in ends})
    return out


def report_lines(report: Counts) -> Iterator[str]:
    """Yield the lines of the report."""
    total, size = report["num_rows"], report["num_bytes"]
    tokens = f"about {report['estimated_tokens']:,} tokens ({BYTES_PER_TOKEN} bytes each)"
    yield _line("rows", f"{total:,} in {', '.join(report['datasets'])}; {size / 1e6:,.1f} MB of text, {tokens}")
    if (invalid := report["invalid"])["num_rows"]:
        codes = ", ".join(f"{number:,} {code}" for code, number in invalid["codes"].items())
        yield _line("invalid", f"{_rows(invalid['num_rows'])} cannot be read: {codes}")
        yield from (_line("", f"{e['row']}: {e['message']}") for e in invalid["examples"])
    for check, what in (("exact", "equal to an earlier row"), ("near", "similar to an earlier row")):
        if (found := report.get(check)) is not None:
            clusters = f" (clusters: {found['num_clusters']:,})" if found["num_clusters"] else ""
            yield _line(check, f"{_share(found, total)} {what}{clusters}")
            yield from (_line("", f"{e['size']:,} rows: {', '.join(e['rows'])}") for e in found["examples"])
    if (found := report.get("overlap")) is not None:
        yield from _overlap_lines(found, total)
    if (found := report.get("language")) is not None:
        yield from _language_lines(found, total)
    if (found := report.get("length")) is not None:
        yield from _length_lines(found, total)


def _overlap_lines(found: Counts, total: int) -> Iterator[str]:
    limit = f"{found['threshold']:.0%} of a text of an evaluation" if found["threshold"] else "an n-gram of one"
    yield _line("overlap", f"{_share(found, total)} with {limit} (n-grams of {found['ngram']} words)")
    for of_set in found["evaluations"]:
        short = f"; {of_set['num_not_compared']:,} too short to compare" if of_set["num_not_compared"] else ""
        yield _line(
            "",
            f"{of_set['name']}: {of_set['num_found']:,} of {of_set['num_rows']:,} rows found "
            f"({of_set['num_with_common_ngram']:,} with a common n-gram{short})",
        )
    yield from (_line("", f"{e['row']} has {e['coverage']:.0%} of {e['evaluation']}") for e in found["examples"])


def _language_lines(found: Counts, total: int) -> Iterator[str]:
    listed = list(found["languages"].items())
    parts = [f"{name} {of['num_rows'] / total:.1%} ({of['example']})" for name, of in listed[: 2 * EXAMPLES]]
    more = f", {len(listed) - 2 * EXAMPLES} more" if len(listed) > 2 * EXAMPLES else ""
    yield _line("language", ", ".join(parts) + more)
    if "keep" in found:
        yield _line("", f"{_share(found, total)} in other languages than {', '.join(found['keep'])}")


def _length_lines(found: Counts, total: int) -> Iterator[str]:
    if "quantiles" in found:
        parts = [f"{float(q):.0%} {words:,}" for q, words in found["quantiles"].items()]
        ends = [f"{name} {found[name]['words']:,} ({found[name]['row']})" for name in ("shortest", "longest")]
        yield _line("length", f"words: {', '.join((*parts, *ends))}")
    if "num_rows" in found:
        limits = [f"below {found['min_words']:,}"] if found["min_words"] else []
        limits += [f"above {found['max_words']:,}"] if found["max_words"] else []
        examples = f": {', '.join(found['examples'])}" if found["examples"] else ""
        yield _line("", f"{_share(found, total)} {' or '.join(limits)} words{examples}")


def _share(found: Counts, total: int) -> str:
    share = found["num_rows"] / max(1, total)
    return f"{_rows(found['num_rows'])} ({share:.2%}, about {found['estimated_tokens']:,} tokens)"


def _rows(number: int) -> str:
    return "1 row" if number == 1 else f"{number:,} rows"


def _line(label: str, text: str) -> str:
    return f"{label:9} {text}"
