"""Settings of a quality report, with their rules. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_range, require_package

CHECKS = ("exact", "near", "overlap", "language", "length")
REASONS = ("invalid", *CHECKS)
_PACKAGES = {"near": "rensa", "language": "py3langid"}


@dataclass(frozen=True)
class QualityOptions:
    """What is measured, and which rows are removed.

    Attributes:
        checks: a selection of `CHECKS`.
        remove: reasons of `REASONS` for which rows are removed. `near` includes exact duplicates.
        similarity: smallest Jaccard similarity of near duplicates.
        ngram: words of an n-gram that is compared with evaluations.
        overlap: smallest coverage of an evaluation's text by a row, in 0..1. 0: one common n-gram.
        languages: languages to keep.
        min_words, max_words: lengths to keep. None: no limit.
    """

    checks: tuple[str, ...]
    remove: tuple[str, ...] = ()
    similarity: float = 0.8
    ngram: int = 13
    overlap: float = 0.5
    languages: tuple[str, ...] = ()
    min_words: int | None = None
    max_words: int | None = None

    def __post_init__(self) -> None:
        check_range("--similarity", self.similarity, at_least=0.3, at_most=1, fix="--similarity 0.8")
        check_range("--ngram", self.ngram, at_least=3, fix="--ngram 13")
        check_range("--overlap", self.overlap, at_least=0, at_most=1, fix="--overlap 0.5")
        for name, needed, is_set, fix in (
            ("language", "--languages", self.languages, "--languages en,unknown"),
            ("length", "--min-words or --max-words", self.min_words or self.max_words, "--min-words 5"),
        ):
            if name in self.remove and not is_set:
                raise _requires(f"--remove {name}", needed, fix)
        if missing := [name for name in self.remove if name != "invalid" and name not in self.checks]:
            needed = "--against" if missing[0] == "overlap" else f"--checks {','.join((*self.checks, missing[0]))}"
            raise _requires(f"--remove {missing[0]}", needed, needed)
        for check, package in _PACKAGES.items():
            if check in self.checks:
                others = ",".join(name for name in self.checks if name not in _PACKAGES) or "exact"
                install = f"'automodel-cli[quality]', or --checks {others}"
                require_package(package, f"the check {check}", install=install, keys=("--checks",))


def choose_checks(given: Sequence[str] | None, has_evaluations: bool) -> tuple[str, ...]:
    """Return the checks: all by default, and `overlap` only with evaluations. Raises ConfigError."""
    if given is None:
        return tuple(check for check in CHECKS if check != "overlap" or has_evaluations)
    if ("overlap" in given) != has_evaluations:
        option, other = ("--checks overlap", "--against") if "overlap" in given else ("--against", "--checks overlap")
        raise _requires(option, other, f"{other} EVAL" if other == "--against" else "--checks overlap")
    return tuple(check for check in CHECKS if check in given)


def _requires(option: str, other: str, fix: str) -> ConfigError:
    return ConfigError(f"{option} requires {other}", code="requires_setting", keys=(option.split()[0],), fix=fix)
