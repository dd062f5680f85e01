"""What preparation did to the data, in numbers: the lines of the run's header."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LongReport:
    """Documents longer than `seq_len`: how many there were, the tokens in them, and how many of those are not trained
    on.
    """

    choice: str
    num_documents: int = 0
    num_tokens: int = 0
    tokens_lost: int = 0
    pieces_without_labels: int = 0

    def text(self, total: int) -> str:
        """One phrase for the header; says zero as well."""
        if not self.num_documents:
            return "no document longer than a row"
        done = {"split": "split", "truncate": "truncated", "drop": "dropped"}.get(self.choice, self.choice)
        lost = f"{self.tokens_lost:,} tokens left out" if self.tokens_lost else "no token lost"
        text = f"{self.num_documents:,} of {total:,} documents longer than a row {done}"
        text += f" ({self.num_tokens:,} tokens; {lost}"
        if self.pieces_without_labels:
            text += f", of them {self.pieces_without_labels:,} pieces without a trained token"
        return text + ")"


@dataclass(frozen=True)
class SourceReport:
    """One dataset from its rows to its packed rows. Token counts are before packing, label tokens after it."""

    name: str
    fmt: str
    num_rows: int
    num_rejected: int
    rejected_path: str
    num_documents: int
    num_tokens: int
    num_label_tokens: int
    masked_by: str
    ends_trained: float
    packing: str
    seq_len: int
    num_packed_rows: int
    fill: float
    long: LongReport
    weight: float
    built: bool

    def lines(self) -> Iterable[str]:
        """Rows, tokens and packing; one line each, and a warning where the model would not learn to stop."""
        times = "" if self.weight == 1 else f", each seen {self.weight:g} times per epoch"
        refused = f", {self.num_rejected:,} rejected -> {self.rejected_path}" if self.num_rejected else ""
        yield f"{self.name}: {self.num_rows:,} rows ({self.fmt}){refused}{times}"
        share = 100 * self.num_label_tokens / max(1, self.num_tokens)
        trained = f"{self.num_label_tokens:,} trained ({share:.1f}%)"
        yield f"  {self.num_tokens:,} tokens, {trained}, mask by {self.masked_by}"
        long = self.long.text(self.num_documents)
        rows = f"{self.num_packed_rows:,} rows of {self.seq_len}"
        if self.packing == "none":
            yield f"  not packed: {self.num_packed_rows:,} rows of up to {self.seq_len} tokens; {long}"
        elif self.packing == "wrapped":
            yield f"  wrapped into {rows}, {100 * self.fill:.1f}% full; documents are cut at every row's end"
        else:
            yield f"  packed {self.packing} into {rows}, {100 * self.fill:.1f}% full; {long}"
        if self.ends_trained < 0.5:
            ends = (
                f"only {100 * self.ends_trained:.0f}% of the documents end their last trained turn with a special token"
            )
            yield f"  warning: {ends}: the model may never learn to stop"


@dataclass(frozen=True)
class DataReport:
    """All datasets of a run. `built` is False when everything came from the cache."""

    train: list[SourceReport]
    validation: list[SourceReport] = field(default_factory=list)
    cache: str = ""
    seconds: float = 0.0

    @property
    def built(self) -> bool:
        """Whether anything was tokenised or packed now."""
        return any(source.built for source in [*self.train, *self.validation])

    def lines(self) -> list[str]:
        """For the run's header, without a label in front."""
        out = [line for source in self.train for line in source.lines()]
        for source in self.validation:
            label = f"{source.num_label_tokens:,} trained tokens in {source.num_packed_rows:,} rows"
            out.append(f"validation: {source.num_documents:,} documents of {source.name}, {label}")
        state = f"prepared in {self.seconds:.1f} s, kept in" if self.built else "taken from the cache"
        return [*out, f"{state} {self.cache}"]
