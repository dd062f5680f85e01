"""Statistics of data preparation, printed in the startup summary."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from automodel_cli.config.errors import DataError

MANY = 0.01
"""Skipping a larger fraction of the rows than this logs a separate warning."""
KEEP_MOST = 0.95
"""Fraction of documents for which the warning suggests a length, in addition to all of them."""


def round_length(tokens: int) -> int:
    """Return the next multiple of 64, which parallel layouts divide."""
    return -(-tokens // 64) * 64


@dataclass(frozen=True)
class LongReport:
    """Documents longer than `seq_len`: their number, their tokens, and how many of these tokens are not trained.
    `length_of_most`: a length that `KEEP_MOST` of all documents fit into.
    """

    choice: str
    num_documents: int = 0
    num_tokens: int = 0
    tokens_lost: int = 0
    pieces_without_labels: int = 0
    seq_len: int = 0
    longest: int = 0
    length_of_most: int = 0

    def text(self, total: int) -> str:
        """Return one phrase for the startup summary, also for zero documents."""
        if not self.num_documents:
            return "no document longer than a row"
        done = {"split": "split", "truncate": "truncated", "drop": "dropped"}.get(self.choice, self.choice)
        lost = f"{self.tokens_lost:,} tokens left out" if self.tokens_lost else "no token lost"
        text = f"{self.num_documents:,} of {total:,} documents longer than a row {done}"
        text += f" ({self.num_tokens:,} tokens; {lost}"
        if self.pieces_without_labels:
            what = "documents" if self.choice == "truncate" else "pieces"
            text += f", of them {self.pieces_without_labels:,} {what} without a trained token"
        return text + ")"

    def warning(self, total: int) -> str | None:
        """Return a warning if many documents are dropped: their number, and the lengths that keep them."""
        gone = {"drop": self.num_documents, "truncate": self.pieces_without_labels}.get(self.choice, 0)
        if gone <= MANY * total:
            return None
        all_of_them, most = round_length(self.longest), round_length(self.length_of_most)
        keep = f"data.seq_len={all_of_them} keeps all of them"
        if self.seq_len < most < all_of_them:
            keep += f", data.seq_len={most} keeps {100 * KEEP_MOST:.0f}% of the documents"
        why = "longer than a row" if self.choice == "drop" else "without a trained token in their first row"
        share = f"{100 * gone / total:.0f}% of the documents ({gone:,} of {total:,})"
        return f"{share} are left out, {why} of {self.seq_len}: {keep}"

    def check_kept(self, name: str, total: int) -> None:
        """Raise DataError if every document of the dataset `name` is dropped."""
        if self.choice == "drop" and self.num_documents == total:
            raise DataError(
                f"all {total:,} documents of {name} are longer than data.seq_len={self.seq_len} and dropped; the "
                f"longest has {self.longest:,} tokens",
                code="not_enough_rows",
                keys=("data.seq_len",),
                fix=f"data.seq_len={round_length(self.longest)}",
            )


@dataclass(frozen=True)
class UnrolledReport:
    """Conversations that became one document per trained turn, and the number of tokens that are repeated in them."""

    rows: int = 0
    documents: int = 0
    repeated: int = 0

    def text(self, num_rows: int, num_tokens: int) -> str:
        """Return one phrase for the startup summary."""
        share = 100 * self.repeated / max(1, num_tokens)
        return (
            f"turns: {self.rows:,} of {num_rows:,} rows unrolled into {self.documents:,} documents, because the chat "
            f"template shows a turn another history than the next; {self.repeated:,} tokens repeat ({share:.1f}%)"
        )


@dataclass(frozen=True)
class SpecialReport:
    """Special tokens in the text of rows: their treatment, their number, and the number of rows."""

    choice: str
    num_tokens: int = 0
    num_rows: int = 0

    def lines(self) -> Iterable[str]:
        """Yield one line, if there are any."""
        if self.num_tokens:
            done = "control tokens" if self.choice == "keep" else "plain text"
            where = "1 row" if self.num_rows == 1 else f"{self.num_rows:,} rows"
            yield f"  {self.num_tokens:,} special tokens in the text of {where} trained as {done}"


@dataclass(frozen=True)
class InfillReport:
    """Documents whose middle was moved to the end, and selected ones that are too long for it."""

    moved: int = 0
    too_long: int = 0

    def lines(self, total: int) -> Iterable[str]:
        """Yield one line, if there are any."""
        if self.moved or self.too_long:
            long = f"; {self.too_long:,} longer than a row are unchanged" if self.too_long else ""
            share = 100 * self.moved / max(1, total)
            yield f"  fill in the middle: {self.moved:,} of {total:,} documents ({share:.1f}%){long}"


@dataclass(frozen=True)
class SourceReport:
    """Statistics of one dataset. Token counts are before packing, label tokens after it."""

    name: str
    fmt: str
    num_rows: int
    num_rejected: int
    rejected_codes: Mapping[str, int]
    rejected_path: str
    num_documents: int
    num_tokens: int
    num_label_tokens: int
    masked_by: str
    special: SpecialReport
    unused: list[str]
    ends_trained: float
    packing: str
    seq_len: int
    num_packed_rows: int
    fill: float
    long: LongReport
    use: str
    built: bool
    unrolled: UnrolledReport = field(default_factory=UnrolledReport)
    infill: InfillReport = field(default_factory=InfillReport)
    note: str = ""

    def lines(self) -> Iterable[str]:
        """Yield one line each for rows, tokens and packing, and one for each warning."""
        use = f", {self.use}" if self.use else ""
        refused = f", {self.num_rejected:,} rejected" if self.num_rejected else ""
        yield f"{self.name}: {self.num_rows:,} rows ({self.fmt}){refused}{use}"
        if self.num_rejected:
            codes = ", ".join(f"{count:,} {code}" for code, count in self.rejected_codes.items())
            yield f"  rejected: {codes} -> {self.rejected_path}"
        if self.note:
            yield f"  {self.note}"
        if self.unused:
            yield f"  columns without effect: {', '.join(self.unused)}"
        yield from self.special.lines()
        yield from self.infill.lines(self.num_rows - self.num_rejected)
        share = 100 * self.num_label_tokens / max(1, self.num_tokens)
        trained = f"{self.num_label_tokens:,} trained ({share:.1f}%)"
        yield f"  {self.num_tokens:,} tokens, {trained}, loss mask: {self.masked_by}"
        if self.unrolled.rows:
            yield f"  {self.unrolled.text(self.num_rows, self.num_tokens)}"
        long = self.long.text(self.num_documents)
        rows = f"{self.num_packed_rows:,} rows of {self.seq_len}"
        if self.packing == "none":
            yield f"  not packed: {self.num_packed_rows:,} rows of up to {self.seq_len} tokens; {long}"
        elif self.packing == "wrapped":
            yield f"  wrapped into {rows}, {100 * self.fill:.1f}% full; documents are cut at every row's end"
        else:
            yield f"  packed {self.packing} into {rows}, {100 * self.fill:.1f}% full; {long}"
        yield from (f"  warning: {text}" for text in self._warnings())

    def _warnings(self) -> Iterable[str]:
        if self.num_rejected > MANY * self.num_rows:
            share = f"{100 * self.num_rejected / self.num_rows:.0f}% of the rows ({self.num_rejected:,})"
            yield f"{share} are rejected and skipped; {self.rejected_path} lists the reasons"
        if (vanished := self.long.warning(self.num_documents)) is not None:
            yield vanished
        if self.ends_trained < 0.5:
            ends = (
                f"only {100 * self.ends_trained:.0f}% of the documents end their last trained turn with a special token"
            )
            yield f"{ends}: the model may never learn to stop"


@dataclass(frozen=True)
class DataReport:
    """Statistics of all datasets of a run. `built` is False if everything came from the cache."""

    train: list[SourceReport]
    validation: list[SourceReport] = field(default_factory=list)
    cache: str = ""
    seconds: float = 0.0

    @property
    def built(self) -> bool:
        """Whether data was tokenized or packed in this call."""
        return any(source.built for source in [*self.train, *self.validation])

    def lines(self) -> list[str]:
        """Return the lines of the startup summary, without a label."""
        out = [line for source in self.train for line in source.lines()]
        for source in self.validation:
            label = f"{source.num_label_tokens:,} trained tokens in {source.num_packed_rows:,} rows"
            out.append(f"validation: {source.num_documents:,} documents of {source.name}, {label}")
        state = f"prepared in {self.seconds:.1f} s, kept in" if self.built else "taken from the cache"
        return [*out, f"{state} {self.cache}"]
