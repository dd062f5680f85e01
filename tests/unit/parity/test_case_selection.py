"""Which rows a recipe is verified with, and what a small copy leaves of its settings."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from automodel_cli.config.errors import ConfigError
from automodel_cli.distributed.config import DDPConfig, FSDP2Config, MixedPrecision
from automodel_cli.distributed.mesh_config import MeshConfig
from automodel_cli.models.fp8_config import Fp8Config
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.objectives.sft import SFT
from automodel_cli.parity.case_selection import choose_cases, pick, small_pipeline
from automodel_cli.parity.cases import Case
from automodel_cli.parity.option_cases import with_settings
from automodel_cli.pipelining.config import PipelineConfig
from tests.errors import raises


def layouts(rows: list[Case]) -> list[str]:
    return [row.layout for row in rows if row.packed]


def choose(parallelizer=None, schedule: str | None = None, **sizes: int) -> list[Case]:
    pipeline = PipelineConfig(schedule=schedule) if schedule else None
    return choose_cases(MeshConfig(**sizes), parallelizer or FSDP2Config(), pipeline, SFT())


def test_one_rank_and_whatever_ranks_there_are():
    assert layouts(choose()) == ["one rank", "dp2"]
    assert layouts(choose(dp_size=1)) == ["one rank"]
    assert layouts(choose(DDPConfig(), dp_size=4)) == ["one rank", "dp2 ddp"]


def test_every_axis_alone_and_all_together():
    rows = choose(schedule="zbv", pp_size=4, ep_size=8)
    assert layouts(rows) == ["one rank", "pp2 zbv", "dp2", "dp2 ep2", "pp2 zbv dp2 ep2"]
    assert [row.world_size for row in rows if row.packed] == [1, 2, 2, 2, 4]
    assert layouts(choose(ep_size=4)) == ["one rank", "dp2", "dp2 ep2"], "nothing twice"


def test_packed_and_padded_of_each():
    rows = choose(cp_size=2, dp_size=1)
    assert [str(row) for row in rows] == ["one rank, packed", "one rank, padded", "cp2, packed", "cp2, padded"]


def test_replicas_need_four_ranks_and_replace_plain_sharding():
    rows = choose(schedule="1f1b", dp_replicate_size=2, pp_size=2)
    assert layouts(rows) == ["one rank", "pp2 1f1b", "dp4 hsdp2", "pp2 1f1b dp4 hsdp2"]


def test_more_than_eight_ranks_become_every_largest_set_that_fits():
    rows = choose(schedule="1f1b", pp_size=2, tp_size=2, cp_size=2, dp_size=2)
    together = [row for row in rows if row.packed and row.world_size == 8]
    assert [row.layout for row in together] == [
        "pp2 1f1b cp2 tp2",
        "pp2 1f1b dp2 tp2",
        "pp2 1f1b dp2 cp2",
        "dp2 cp2 tp2",
    ]
    assert max(row.world_size for row in rows) == 8


def test_options_of_tensor_parallelism_stay_with_it():
    rows = choose(FSDP2Config(sequence_parallel=True), tp_size=2, dp_size=2)
    assert layouts(rows) == ["one rank", "tp2 sp", "dp2", "dp2 tp2 sp"]


@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("cp", [1, 4])
@pytest.mark.parametrize("sizes", [{}, {"tp_size": 4}, {"ep_size": 4}, {"dp_replicate_size": 2}, {"dp_size": 1}])
def test_every_row_fits_its_ranks_and_its_parallelizer(pp: int, cp: int, sizes: dict[str, int]):
    if sizes.get("dp_replicate_size") and sizes.get("dp_size") == 1:
        pytest.skip("no request")
    for row in choose(schedule="interleaved_1f1b" if pp > 1 else None, pp_size=pp, cp_size=cp, **sizes):
        layout = row.mesh.resolve(row.world_size)
        row.parallelizer.check_mesh(row.mesh)
        count = row.num_microbatches // layout.dp
        assert row.world_size <= 8 and count >= 2
        assert (row.pipeline is not None) == (layout.pp > 1)
        if row.pipeline is not None:
            row.pipeline.check(layout.pp, count)


def test_the_cut_into_stages_is_left_out_and_the_schedule_kept():
    small = small_pipeline(PipelineConfig(schedule="interleaved_1f1b", layout="Et*3|(tt|)*28,t|t|L"))
    assert small == PipelineConfig(schedule="interleaved_1f1b")


def test_rows_by_words():
    rows = choose(schedule="zbv", pp_size=2)
    assert [str(row) for row in pick(rows, ["pp2 packed"])] == ["pp2 zbv, packed", "pp2 zbv dp2, packed"]
    assert pick(rows, []) == rows
    with raises(ConfigError, "unknown_name", keys=("--rows",), values=("tp2",)):
        pick(rows, ["tp2"])


def recipe(parallelizer=None, *, lora=None, pipeline=None, attention="packed", dtype="float32", fp8=None, **sizes: int):
    model = SimpleNamespace(
        lora=lora, attn_implementation=attention, dtype=dtype, transformer_engine=None, mtp=None, fp8=fp8, qat=None
    )
    return SimpleNamespace(
        model=model,
        parallelizer=parallelizer or FSDP2Config(mp_policy=MixedPrecision(param_dtype=None)),
        pipeline=pipeline,
        mesh=MeshConfig(**sizes),
        data=SimpleNamespace(packing="best_fit"),
    )


def settings(of, num_layers: int = 30):
    return with_settings(of, choose_cases(of.mesh, of.parallelizer, of.pipeline, SFT()), num_layers)


def test_adapters_are_on_every_row_and_what_has_no_exact_value_is_named():
    chosen = settings(recipe(lora=LoRAConfig(rank=4, dropout=0.1, quantization="nf4"), dp_size=2))
    assert all(row.lora == LoRAConfig(rank=4) for row in chosen.rows) and len(chosen.rows) == 4
    assert [line.split(":")[0] for line in chosen.not_covered] == [
        "model.lora.quantization=nf4",
        "model.lora.dropout=0.1",
    ]
    assert "lora" in str(chosen.rows[0])


def test_products_of_8_bits_have_rows_of_their_own_that_emulate_them():
    chosen = settings(recipe(fp8=Fp8Config(recipe="tensorwise"), dp_size=2))
    cast = [row for row in chosen.rows if not row.is_exact]
    assert [str(row) for row in cast] == ["one rank fp8:tensorwise, packed", "dp2 fp8:tensorwise, packed"]
    assert all(row.fp8 == Fp8Config(recipe="tensorwise", emulate=True) for row in cast) and not chosen.not_covered
    assert cast[0].bounds(1e-5) == (2.0**-5, 0.5) and chosen.rows[0].bounds(1e-5) == (1e-5, 1e-5)


def test_lower_precision_has_rows_with_a_bound_in_its_own_units():
    chosen = settings(recipe(FSDP2Config(), dp_size=2))
    low = [row for row in chosen.rows if row.compute_dtype]
    assert [str(row) for row in low] == ["one rank bfloat16, packed", "dp2 bfloat16, packed"]
    assert low[0].bounds(1e-5) == (2 * 2.0**-7, 32 * 2.0**-7) and chosen.rows[0].bounds(1e-5) == (1e-5, 1e-5)
    assert low[0].parallelizer.mp_policy == FSDP2Config().mp_policy and not chosen.not_covered


def test_compilation_and_the_recipes_own_stages_have_a_row():
    compiled = recipe(DDPConfig(enable_compile=True, compile_backend="aot_eager"), dp_size=2)
    assert [str(row) for row in settings(compiled).rows][-1] == "one rank compiled:aot_eager, packed"
    layout = PipelineConfig(schedule="interleaved_1f1b", layout="Et*3|(tt|)*28,t|t|L")
    chosen = settings(recipe(pipeline=layout, pp_size=4, dp_size=1))
    own = [row for row in chosen.rows if row.own_layers]
    assert [(str(row), row.pipeline) for row in own] == [("pp4 interleaved_1f1b own-stages:4, packed", layout)]
    many = settings(recipe(pipeline=layout, pp_size=16, dp_size=1))
    assert not any(row.own_layers for row in many.rows)
    assert "more than 8 ranks" in many.not_covered[0] and "pipeline.layout=" in many.not_covered[0]


def test_kernels_of_cuda_devices_are_named_as_not_covered():
    chosen = settings(recipe(attention="flash_attention_2", dtype="bfloat16", dp_size=1))
    assert [line.split(":")[0] for line in chosen.not_covered] == [
        "model.dtype=bfloat16",
        "model.attn_implementation=flash_attention_2",
    ]
