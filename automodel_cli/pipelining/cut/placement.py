"""Decoder layers of each (rank, chunk): from a layout, from fixed counts at the ends, or evenly. Torch-free.

Options and arithmetic are those of Megatron-core (`account_for_embedding_in_pipeline_split`,
`num_layers_in_first_pipeline_stage`, ...).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from automodel_cli.config.errors import ConfigError
from automodel_cli.pipelining.cut.layout_string import StageLayout, num_chunks, parse_layout, validate_layout


class PlacementError(ConfigError):
    """Options that describe no valid placement.

    `code` is not-divisible, not-positive, middle-mismatch, vpp-conflict or exclusive-options.
    """

    def __init__(self, text: str, *, code: str, keys: tuple[str, ...] = (), fix: str | None = None):
        super().__init__(text, code=code, keys=keys, fix=fix)


@dataclass(frozen=True)
class StageLayers:
    """Location and layers of one stage. `letters` is the stage as a layout string."""

    rank: int
    chunk: int
    num_layers: int
    offset: int
    letters: str


@dataclass(frozen=True)
class Placement:
    """All stages in pipeline order. Stage s is chunk `s // pp_size` of rank `s % pp_size`."""

    pp_size: int
    num_chunks: int
    stages: tuple[StageLayers, ...]
    source: str | None = None

    @property
    def mtp_ranks(self) -> tuple[int, ...]:
        """Ranks with multi-token-prediction layers."""
        return tuple(sorted({s.rank for s in self.stages if "m" in s.letters}))

    @property
    def mtp_standalone(self) -> bool:
        """Whether MTP layers are on another rank than the last. Tensors between those stages then have other shapes."""
        return any(rank != self.pp_size - 1 for rank in self.mtp_ranks)

    @property
    def microbatch_group_size(self) -> int:
        """Default group of the interleaved schedule: depth first."""
        return self.pp_size

    def of_rank(self, rank: int) -> tuple[StageLayers, ...]:
        """Return the chunks of one rank, in order."""
        return self.stages[rank :: self.pp_size]

    def layer_ranges(self) -> list[range]:
        """Return the decoder layers per stage, in pipeline order. Empty for stages without layers."""
        return [range(s.offset, s.offset + s.num_layers) for s in self.stages]


def place_layout(layout: StageLayout | str | Sequence[Sequence[str]], pp_size: int) -> Placement:
    """Return the stages of a layout on `pp_size` ranks.

    Checks the number of stages only. `validate_layout` checks the other rules.
    """
    layout = layout if isinstance(layout, StageLayout) else parse_layout(layout)
    return _placement(
        layout.letters, pp_size, num_chunks(layout, pp_size), layout.source if isinstance(layout.source, str) else None
    )


def place_layers(
    num_layers: int,
    pp_size: int,
    *,
    layout: str | Sequence[Sequence[str]] | None = None,
    vpp_size: int | None = None,
    layers_per_virtual_stage: int | None = None,
    mtp_num_layers: int | None = None,
    account_for_embedding: bool = False,
    account_for_loss: bool = False,
    first_stage_layers: int | None = None,
    last_stage_layers: int | None = None,
) -> Placement:
    """Return the decoder layers per (rank, chunk). Raises PlacementError and LayoutError.

    Set at most one of: `layout`, `layers_per_virtual_stage`, counts of the first and last rank, or
    `account_for_embedding` and `account_for_loss`, which count as one layer each. Without them the split is even. The
    layers of a rank are split evenly into `vpp_size` chunks.
    """
    fixed_ends = first_stage_layers is not None or last_stage_layers is not None
    ways = {
        "layout": layout is not None,
        "layers_per_virtual_stage": layers_per_virtual_stage is not None,
        "first_stage_layers/last_stage_layers": fixed_ends,
        "account_for_embedding/account_for_loss": account_for_embedding or account_for_loss,
    }
    chosen = [name for name, used in ways.items() if used]
    if len(chosen) > 1:
        raise PlacementError(
            f"{' and '.join(chosen)} cannot be set together", code="exclusive-options", fix=f"keep {chosen[0]} only"
        )
    if layout is not None:
        return _place_checked_layout(layout, num_layers, pp_size, vpp_size, mtp_num_layers)
    if pp_size < 1 or (vpp_size is not None and vpp_size < 1):
        raise PlacementError(f"pp_size={pp_size} and vpp_size={vpp_size} must be at least 1", code="not-positive")
    if layers_per_virtual_stage is not None:
        vpp_size = _chunks_from_layers(num_layers, pp_size, vpp_size, layers_per_virtual_stage)
    chunks = vpp_size or 1
    if fixed_ends:
        per_chunk = _fixed_ends(num_layers, pp_size, chunks, first_stage_layers, last_stage_layers)
    else:
        per_chunk = [_even(num_layers, pp_size, chunks, int(account_for_embedding) + int(account_for_loss))] * pp_size
    # Stage s is chunk s // p of rank s % p. With p = 2 and 2 chunks: ranks 0, 1, 0, 1.
    counts = [per_chunk[s % pp_size] for s in range(pp_size * chunks)]
    # Embedding and loss were counted as layers, so that their stages have one decoder layer less. Example: 14 layers on
    # 4 ranks with both counted: 16 / 4 = 4 per stage, so 3, 4, 4, 3 decoder layers.
    counts[0] -= account_for_embedding
    counts[-1] -= account_for_loss
    letters = ["t" * n for n in counts]
    letters[0] = "E" + letters[0]
    letters[-1] += "m" * (mtp_num_layers or 0) + "L"
    return _placement(letters, pp_size, chunks, None)


def _place_checked_layout(
    source: str | Sequence[Sequence[str]],
    num_layers: int,
    pp_size: int,
    vpp_size: int | None,
    mtp_num_layers: int | None,
) -> Placement:
    layout = parse_layout(source)
    chunks = num_chunks(layout, pp_size)
    if vpp_size is not None and vpp_size != chunks:
        raise PlacementError(
            f"the layout has {len(layout.stages)} stages, which are {chunks} per rank with pp_size={pp_size}, but "
            f"vpp_size={vpp_size}",
            code="vpp-conflict",
            keys=("vpp_size",),
            fix=f"vpp_size={chunks}, or leave it out",
        )
    validate_layout(layout, pp_size, num_layers, mtp_num_layers)
    return place_layout(layout, pp_size)


def _chunks_from_layers(num_layers: int, pp_size: int, vpp_size: int | None, layers_per_virtual_stage: int) -> int:
    if vpp_size is not None:
        raise PlacementError("vpp_size and layers_per_virtual_stage cannot be set together", code="exclusive-options")
    if layers_per_virtual_stage < 1:
        raise PlacementError(
            f"layers_per_virtual_stage={layers_per_virtual_stage} must be at least 1", code="not-positive"
        )
    if num_layers % (pp_size * layers_per_virtual_stage):
        raise PlacementError(
            f"layers_per_virtual_stage={layers_per_virtual_stage} does not divide {num_layers} layers into equal "
            f"stages on pp_size={pp_size} ranks",
            code="not-divisible",
        )
    return num_layers // (pp_size * layers_per_virtual_stage)


def _even(num_layers: int, pp_size: int, chunks: int, extra: int) -> int:
    """Return layers per chunk. `extra` counts embedding and loss as layers."""
    if (num_layers + extra) % (pp_size * chunks):
        counted = f"{num_layers} layers" + (f" + {extra} for embedding and loss" if extra else "")
        raise PlacementError(
            f"{counted} must be a multiple of pp_size={pp_size} ranks x {chunks} chunks",
            code="not-divisible",
            fix="write a layout, or set first_stage_layers and last_stage_layers",
        )
    per_chunk = (num_layers + extra) // (pp_size * chunks)
    if per_chunk < 1 and num_layers:
        raise PlacementError(f"{num_layers} layers are too few: every stage needs at least one", code="not-positive")
    return per_chunk


def _fixed_ends(num_layers: int, pp_size: int, chunks: int, first: int | None, last: int | None) -> list[int]:
    """Return layers per chunk of every rank, with given totals on the first and last rank."""
    given = {"first_stage_layers": first, "last_stage_layers": last}
    for name, value in given.items():
        if value is not None and value < 1:
            raise PlacementError(f"{name}={value} must be at least 1", code="not-positive", keys=(name,))
    fixed = [n for n in (first, last) if n is not None]
    middle_ranks, middle = pp_size - len(fixed), num_layers - sum(fixed)
    # Layers without a rank for them, or ranks without layers.
    if middle_ranks < 0 or (middle_ranks == 0) != (middle == 0) or middle < 0:
        raise PlacementError(
            f"{num_layers} layers minus {' + '.join(map(str, fixed))} leave {middle} layers for {middle_ranks} ranks",
            code="middle-mismatch",
        )
    if middle_ranks and middle % middle_ranks:
        raise PlacementError(
            f"{middle} layers must be a multiple of the other {middle_ranks} ranks", code="not-divisible"
        )
    # Example: 18 layers on 4 ranks with first 3 and last 3 leave 12 for the two middle ranks: 3, 6, 6, 3.
    totals = [middle // middle_ranks if middle_ranks else 0] * pp_size
    if first is not None:
        totals[0] = first
    if last is not None:
        totals[-1] = last
    for rank, total in enumerate(totals):
        if total % chunks:
            raise PlacementError(
                f"the {total} layers of rank {rank} must be a multiple of its {chunks} chunks", code="not-divisible"
            )
    return [total // chunks for total in totals]


def _placement(letters: Sequence[str], pp_size: int, chunks: int, source: str | None) -> Placement:
    # Example: 8 layers, 2 ranks, 2 chunks. Stages 0 to 3 are ranks 0, 1, 0, 1. Rank 0 has layers 0-1 and 4-5, rank 1
    # has layers 2-3 and 6-7. Offsets count decoder layers only, not embedding (E), MTP (m) or loss (L).
    stages, offset = [], 0
    for s, stage in enumerate(letters):
        count = stage.count("t")
        stages.append(StageLayers(rank=s % pp_size, chunk=s // pp_size, num_layers=count, offset=offset, letters=stage))
        offset += count
    return Placement(pp_size, chunks, tuple(stages), source)


def render_table(placement: Placement) -> str:
    """Return a table with a line per rank and a column per chunk, with stage number, letters and layers."""
    layers = sum(s.num_layers for s in placement.stages)
    mtp = sum(s.letters.count("m") for s in placement.stages)
    head = f"{placement.pp_size} ranks x {placement.num_chunks} chunks = {len(placement.stages)} stages"
    head += f", {layers} decoder layers"
    if mtp:
        where = "standalone on rank" if placement.mtp_standalone else "with the loss on rank"
        head += f", {mtp} MTP layer{'s' if mtp > 1 else ''} {where} {', '.join(map(str, placement.mtp_ranks))}"
    rows = [["rank", *(f"chunk {c}" for c in range(placement.num_chunks))]]
    for rank in range(placement.pp_size):
        rows.append([str(rank), *(_cell(s, rank + s.chunk * placement.pp_size) for s in placement.of_rank(rank))])
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].rjust(widths[0]), *(x.ljust(w) for x, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]
    lines.insert(1, "  ".join("─" * w for w in widths))
    title = [f"layout {placement.source}"] if placement.source else []
    return "\n".join([*title, head, *(line.rstrip() for line in lines)])


def _cell(stage: StageLayers, index: int) -> str:
    held = [] if "E" not in stage.letters else ["embedding"]
    if stage.num_layers:
        last = stage.offset + stage.num_layers - 1
        held.append(f"layer {last}" if stage.num_layers == 1 else f"layers {stage.offset}-{last}")
    if "m" in stage.letters:
        held.append(f"{stage.letters.count('m')} MTP")
    if "L" in stage.letters:
        held.append("loss")
    return f"s{index:<3} {_short(stage.letters):<6} {' + '.join(held) or 'pass-through'}"


def _short(letters: str) -> str:
    """Shorten a long run of layers to `t*9`. An empty stage is `-`."""
    run = letters.count("t")
    return (letters.replace("t" * run, f"t*{run}") if run > 4 else letters) or "-"
