"""`activation_checkpointing: auto`: the first mode that has room, in the order of what it costs in time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.activation_checkpointing.apply import apply_activation_checkpointing
from automodel_cli.distributed.activation_checkpointing.mode import is_recomputed
from automodel_cli.distributed.config import FSDP2Config
from automodel_cli.distributed.layer_wrapping import transformer_layers
from automodel_cli.distributed.mesh_config import Layout
from automodel_cli.models.builder import build_part
from automodel_cli.planning.activation_checkpointing import GIB, MARGIN, choose_activation_checkpointing
from automodel_cli.planning.plan import make_plan
from automodel_cli.planning.request import PlanRequest
from automodel_cli.planning.reserve import RESERVE_GIB
from tests.e2e.command import automodel, write_config
from tests.errors import raises
from tests.unit.planning.test_plan import request


def _peak(asked: PlanRequest, mode: bool | str) -> float:
    return make_plan(replace(asked, parallelizer=replace(asked.parallelizer, activation_checkpointing=mode))).heaviest


def _memory_with_room_for(peak: float) -> float:
    return peak * (1 + MARGIN) + RESERVE_GIB * GIB


def test_as_little_is_recomputed_as_there_is_room_for():
    asked = request(layout=Layout(), pipeline=None, seq_len=256)
    none, selective, full = (_peak(asked, mode) for mode in (False, "selective", "full"))
    assert full < selective < none
    for mode, peak in ((False, none), ("selective", selective), ("full", full)):
        assert choose_activation_checkpointing(asked, _memory_with_room_for(peak) + 1).mode == mode
    assert choose_activation_checkpointing(asked, _memory_with_room_for(none) - 1024).mode == "selective"


@pytest.mark.slow
def test_as_few_layers_are_recomputed_as_there_is_room_for():
    asked = request(layout=Layout(), pipeline=None, seq_len=256)
    layers = sum(len(stage.layers) for stage in make_plan(asked).stages)
    selective, full = (_peak(asked, mode) for mode in ("selective", "full"))
    peaks = [_peak(asked, f"full:{some}/{layers}") for some in range(layers + 1) if some]
    assert peaks == sorted(peaks, reverse=True) and peaks[-1] == full
    some = next(number for number, peak in enumerate(peaks, 1) if peak < selective)
    for number in range(some, layers):
        room = _memory_with_room_for(peaks[number - 1]) + 1
        choice = choose_activation_checkpointing(asked, room)
        assert choice.mode == f"full:{number}/{layers}" and choice.tried[-1][1] <= choice.room
    assert choose_activation_checkpointing(asked, _memory_with_room_for(full) + 1).mode == "full"


@pytest.mark.parametrize(("mode", "places"), [
    (False, []), ("full", [0, 1, 2, 3, 4, 5, 6, 7]), ("selective", [0, 1, 2, 3, 4, 5, 6, 7]), (3, [0, 3, 6]),
    ("full:3/8", [0, 3, 6]), ("full:4/8", [0, 2, 4, 6]), ("full:8/8", [0, 1, 2, 3, 4, 5, 6, 7]),
])  # fmt: skip
def test_recomputed_layers_are_spread_evenly(mode: bool | int | str, places: list[int]) -> None:
    assert [place for place in range(8) if is_recomputed(place, mode)] == places


def test_every_number_of_layers_can_be_chosen():
    for layers in (2, 7, 32, 80):
        for some in range(1, layers + 1):
            assert sum(is_recomputed(place, f"full:{some}/{layers}") for place in range(layers)) == some


@pytest.mark.parametrize("mode", ["full:0/8", "full:9/8", "full:3", "selective:1/2"])
def test_a_part_of_no_layers_is_refused(mode: str) -> None:
    with pytest.raises(ConfigError) as caught:
        FSDP2Config(activation_checkpointing=mode)
    assert caught.value.code == "invalid_choice"


def test_the_chosen_layers_of_a_model_are_recomputed_and_the_others_are_not() -> None:
    layers = transformer_layers(build_part(request().model).model)
    apply_activation_checkpointing(layers, f"full:1/{len(layers)}")
    assert [getattr(layer, "gradient_checkpointing", False) for layer in layers] == [
        place == 0 for place in range(len(layers))
    ]


def test_tokens_of_other_ranks_are_exchanged_again_only_where_nothing_else_has_room():
    asked = request("qwen3_moe", layout=Layout(dp_shard=2, ep=2), pipeline=None, seq_len=256)
    least = choose_activation_checkpointing(asked, 0.0)
    assert [mode for mode, _ in least.tried] == [False, "selective", "full", "minimal"]
    assert least.mode == "minimal"
    dense = choose_activation_checkpointing(request(layout=Layout(), pipeline=None), 0.0)
    assert dense.mode == "full"
    assert "more than there is" in str(dense)


def test_experts_stay_cast_where_there_is_room_beside_what_is_recomputed():
    asked = request("qwen3_moe", layout=Layout(dp_shard=2, ep=2), pipeline=None, seq_len=256)
    kept = replace(asked, parallelizer=replace(asked.parallelizer, keep_cast_experts=True))
    room = _memory_with_room_for(_peak(kept, False))
    assert _peak(kept, False) > _peak(asked, False)
    assert (
        choose_activation_checkpointing(asked, room + 1).keeps_experts
        and not choose_activation_checkpointing(asked, room - 1024).keeps_experts
    )
    assert "with experts cast once a step" in str(choose_activation_checkpointing(asked, room + 1))
    refused = replace(asked, parallelizer=replace(asked.parallelizer, keep_cast_experts=False))
    assert choose_activation_checkpointing(refused, room + 1) == replace(
        choose_activation_checkpointing(refused, room + 1), mode=False, keeps_experts=False
    )


def test_the_choice_says_its_numbers_and_what_was_turned_down():
    asked = request(layout=Layout(), pipeline=None, seq_len=256)
    choice = choose_activation_checkpointing(asked, _memory_with_room_for(_peak(asked, "selective")) + 1)
    assert str(choice) == "selective (planned peak 0 GiB of 0 to be used; none would need 0)"


def test_layers_are_not_marked_by_a_word_that_only_a_run_understands():
    with raises(ConfigError, "not_supported", keys=("activation_checkpointing",), values=("auto",)):
        apply_activation_checkpointing([], "auto")


@pytest.mark.slow
def test_a_run_on_a_cpu_recomputes_nothing_and_its_header_says_so(tmp_path: Path):
    config = write_config(tmp_path)
    overrides = ("parallelizer.activation_checkpointing=auto", "train.max_steps=1")
    done = automodel(tmp_path, "finetune", "llm", "-c", str(config), *overrides)
    assert done.returncode == 0, done.stderr
    assert "none (memory is not the limit on a CPU)" in done.stdout
