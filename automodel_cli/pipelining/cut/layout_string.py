"""Layout strings: the layers of every pipeline stage. Torch-free.

Letters: `E` embedding, `t` decoder layer, `m` multi-token-prediction (MTP) layer, `L` final norm, head and loss. `|`
ends a stage. `*n` repeats the letter, separator or group before it. Commas are ignored.

Example: `Et*3|(tt|)*29,m|L` is `Ettt`, 29 stages of `tt`, a stage with an MTP layer, and a stage with the loss.

Grammar (ASCII, case-sensitive, no white space)::

    layout = { "," | unit }
    unit   = ( "E" | "t" | "m" | "L" | "|" ) [ "*" INT ]  |  "(" body ")" "*" INT
    body   = one or more plain units and commas, no "("

The language is Megatron-core's `pipeline_model_parallel_layout`. Megatron-core substitutes text, this module parses:
`t*2,3` is an error and not 23 layers. Every item stores the position of its character, so that all errors can point at
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from automodel_cli.config.errors import ConfigError

LETTERS = "EtmL"
NAMES = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
MAX_ITEMS = 100_000
DIGITS = "0123456789"

Position = int | tuple[int, int | None] | None
"""Character index in the string, [stage, item] in the list form, or None if no single position is wrong."""


class LayoutError(ConfigError):
    """A layout that is malformed or invalid, with a `code`, a `position`, and a message with a caret."""

    def __init__(
        self, text: str, *, code: str, position: Position = None, source: object = None, fix: str | None = None
    ):
        self.position = position
        pointer = _pointer(source, position)
        super().__init__(f"layout: {text}{pointer}", code=code, keys=("layout",), fix=fix)


def _pointer(source: object, position: Position) -> str:
    """Return the source with a caret below the wrong character, or the position in the list form."""
    match position:
        case (stage, item):
            return f"\n  at stage {stage}" + ("" if item is None else f", item {item}")
    if not isinstance(source, str):
        return ""
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in source)
    return f"\n  {shown}" + ("" if position is None else f"\n  {' ' * position}^")


@dataclass(frozen=True)
class Item:
    """One letter of a stage and its position in the source."""

    letter: str
    position: Position


@dataclass(frozen=True)
class StageLayout:
    """A parsed layout: the items of every stage in order, and the source for error messages."""

    stages: tuple[tuple[Item, ...], ...]
    source: str | Sequence[Sequence[str]]

    @property
    def letters(self) -> tuple[str, ...]:
        """One string over `EtmL` per stage. Empty stages are empty strings."""
        return tuple("".join(item.letter for item in stage) for stage in self.stages)

    def count(self, letter: str) -> int:
        """Return how often `letter` occurs in the layout."""
        return sum(stage.count(letter) for stage in self.letters)

    def error(self, text: str, code: str, position: Position = None, fix: str | None = None) -> LayoutError:
        """Return a `LayoutError` about this layout."""
        return LayoutError(text, code=code, position=position, source=self.source, fix=fix)


def parse_layout(source: str | Sequence[Sequence[str]]) -> StageLayout:
    """Read a layout string, or its list form `[["embedding", "decoder"], ["decoder", "loss"]]`.

    Raises LayoutError (codes `stray-digit`, `chained-star`, `dangling-star`, `bad-count`, `missing-count`,
    `empty-group`, `nested-group`, `unclosed-group`, `stray-close`, `bad-character`, `too-long`; list form:
    `bad-item-type`, `unknown-layer`).
    """
    if isinstance(source, str):
        return StageLayout(_split_stages(_Parser(source).run()), source)
    return _parse_list(source)


def _split_stages(items: Sequence[Item]) -> tuple[tuple[Item, ...], ...]:
    stages: list[list[Item]] = [[]]
    for item in items:
        if item.letter == "|":
            stages.append([])
        else:
            stages[-1].append(item)
    return tuple(tuple(stage) for stage in stages)


# Example: "Et*2|(t|)*2tL" is Ett | t | t | tL. A count applies to one letter, to "|", or to a group in parentheses.
class _Parser:
    """Recursive-descent parser. `at` is the index of the next character."""

    def __init__(self, source: str):
        self.source, self.at = source, 0

    def fail(self, code: str, text: str, position: int) -> LayoutError:
        return LayoutError(text, code=code, position=position, source=self.source)

    def peek(self) -> str:
        return self.source[self.at : self.at + 1]

    def run(self) -> list[Item]:
        items: list[Item] = []
        while self.peek():
            if self.peek() == ")":
                raise self.fail("stray-close", "')' closes no group", self.at)
            items += self.group() if self.peek() == "(" else self.unit()
            self.guard(len(items))
        return items

    def unit(self) -> list[Item]:
        """Parse one comma, or one letter or separator with its count."""
        char, start = self.peek(), self.at
        if char == ",":
            self.at += 1
            return []
        if char == "*":
            raise self.fail("dangling-star", "'*' must follow a letter, '|' or a group", start)
        if char in DIGITS:
            raise self.fail("stray-digit", "a number must follow '*' directly", start)
        if char not in LETTERS + "|":
            raise self.fail("bad-character", f"{char!r} must be one of: E t m L | * ( ) , and digits", start)
        self.at += 1
        count = self.count() if self.peek() == "*" else 1
        self.guard(count)
        return [Item(char, start)] * count

    def group(self) -> list[Item]:
        """Parse `( body ) * n`."""
        start = self.at
        self.at += 1
        body: list[Item] = []
        if self.peek() == ")":
            raise self.fail("empty-group", "the group is empty", self.at)
        while self.peek() != ")":
            if not self.peek():
                raise self.fail("unclosed-group", "'(' is never closed", start)
            if self.peek() == "(":
                raise self.fail("nested-group", "groups cannot be nested. Write the inner group out", self.at)
            body += self.unit()
            self.guard(len(body))
        self.at += 1
        if self.peek() != "*":
            raise self.fail("missing-count", "'*' and a number must follow ')'", self.at)
        count = self.count()
        self.guard(count * len(body))
        return body * count

    def count(self) -> int:
        """Parse `* INT`. The cursor is on the star."""
        self.at += 1
        start = self.at
        while self.peek() and self.peek() in DIGITS:
            self.at += 1
        digits = self.source[start : self.at].lstrip("0")
        if start == self.at:
            raise self.fail("bad-count", "a number (digits 0-9) must follow '*'", start)
        if self.peek() == "*":
            raise self.fail("chained-star", "a unit has one count only. Multiply the two numbers", self.at)
        if len(digits) > len(str(MAX_ITEMS)):  # Before int(), which takes quadratic time and fails above 4300 digits.
            self.guard(MAX_ITEMS + 1)
        return int(digits or "0")

    def guard(self, items: int) -> None:
        if items > MAX_ITEMS:
            raise self.fail(
                "too-long", f"the layout expands to more than {MAX_ITEMS} items", min(self.at, len(self.source))
            )


def _parse_list(source: Sequence[Sequence[str]]) -> StageLayout:
    for s, stage in enumerate(source):
        if isinstance(stage, str) or not isinstance(stage, Sequence):
            raise LayoutError(
                f"a stage must be a list of names, not {stage!r}", code="bad-item-type", position=(s, None)
            )
        for i, name in enumerate(stage):
            if not isinstance(name, str):
                raise LayoutError(f"an item must be a name, not {name!r}", code="bad-item-type", position=(s, i))
    stages = []
    for s, stage in enumerate(source):
        items = []
        for i, name in enumerate(stage):
            letter = name if name in NAMES.values() else NAMES.get(name.strip().lower())
            if letter is None:
                raise LayoutError(
                    f"{name!r} must be one of: {', '.join(NAMES)}, {', '.join(LETTERS)}",
                    code="unknown-layer",
                    position=(s, i),
                )
            items.append(Item(letter, (s, i)))
        stages.append(tuple(items))
    return StageLayout(tuple(stages), source)


def num_chunks(layout: StageLayout, pp_size: int) -> int:
    """Return the virtual stages per rank, `S / p`.

    Stage s is chunk `s // p` of rank `s % p`. Raises `bad-pp`, `stage-count`.
    """
    stages = len(layout.stages)
    if pp_size < 1:
        raise layout.error(f"pp_size={pp_size} must be at least 1", "bad-pp")
    if stages % pp_size:
        near = [p for p in range(1, stages + 1) if stages % p == 0]
        best = min(near, key=lambda p: abs(p - pp_size))
        raise layout.error(
            f"{stages} stages must be a multiple of pp_size={pp_size} ranks",
            "stage-count",
            fix=f"mesh.pp_size={best} (one of {near})",
        )
    return stages // pp_size


def validate_layout(layout: StageLayout, pp_size: int, num_layers: int, mtp_num_layers: int | None = None) -> None:
    """Raise LayoutError with the first violated rule.

    Order: bad-pp, stage-count, no/duplicate-embedding, no/duplicate-loss, embedding-not-first, loss-not-last,
    layer-count, mtp-count, decoder-after-mtp, mtp-split, mtp-not-last-chunk, mtp-on-first-rank.
    """
    chunks = num_chunks(layout, pp_size)
    _check_ends(layout)
    decoders, mtp = layout.count("t"), layout.count("m")
    if decoders != num_layers:
        raise layout.error(f"it contains {decoders} decoder layers, but the model has {num_layers}", "layer-count")
    if mtp != (mtp_num_layers or 0):
        raise layout.error(
            f"it contains {mtp} multi-token-prediction layers, but the model has {mtp_num_layers or 0}", "mtp-count"
        )
    _check_mtp(layout, pp_size, chunks)


def _check_ends(layout: StageLayout) -> None:
    flat = [(s, i, item) for s, stage in enumerate(layout.stages) for i, item in enumerate(stage)]
    occurrences = {letter: [entry for entry in flat if entry[2].letter == letter] for letter in "EL"}
    for letter, name in (("E", "embedding"), ("L", "loss")):
        if not occurrences[letter]:
            raise layout.error(f"one stage must contain {letter}, the {name}", f"no-{name}")
        if len(occurrences[letter]) > 1:
            raise layout.error(
                f"exactly one stage must contain {letter}, the {name}",
                f"duplicate-{name}",
                occurrences[letter][1][2].position,
            )
    stage, index, item = occurrences["E"][0]
    if (stage, index) != (0, 0):
        raise layout.error("E must be the first item of the first stage", "embedding-not-first", item.position)
    stage, index, item = occurrences["L"][0]
    if (stage, index) != (len(layout.stages) - 1, len(layout.stages[-1]) - 1):
        raise layout.error("L must be the last item of the last stage", "loss-not-last", item.position)


def _check_mtp(layout: StageLayout, pp_size: int, chunks: int) -> None:
    flat = [(s, item) for s, stage in enumerate(layout.stages) for item in stage]
    first = next(((k, s, item) for k, (s, item) in enumerate(flat) if item.letter == "m"), None)
    if first is None:
        return
    k, stage, head = first
    for _, item in flat[k:]:
        if item.letter == "t":
            raise layout.error("t must not follow m: decoder layers come first", "decoder-after-mtp", item.position)
    for s, item in flat[k:]:
        if item.letter == "m" and s != stage:
            raise layout.error("all m must be in one stage", "mtp-split", item.position)
    # Example: 8 stages on 4 ranks. Stages 4 to 7 are chunk 1, the last one of each rank.
    if stage // pp_size != chunks - 1:
        where = f"m is in chunk {stage // pp_size} of rank {stage % pp_size}"
        text = f"{where}, but must be in chunk {chunks - 1}, the last one of the rank"
        raise layout.error(text, "mtp-not-last-chunk", head.position)
    if pp_size > 1 and stage % pp_size == 0:
        raise layout.error("m must not be on rank 0, which has the embedding", "mtp-on-first-rank", head.position)
