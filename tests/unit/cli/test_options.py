"""`automodel options` and docs/config.md: every key has a sentence, and the page is what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from automodel_cli.cli import complete
from automodel_cli.cli.main import run
from automodel_cli.cli.options import page
from automodel_cli.config import bundled, reference
from tests.unit.cli.test_main import check_quick

NODES = reference.nodes()


@pytest.mark.parametrize("node", NODES, ids=lambda node: f"{node.path}:{node.target.rpartition('.')[2]}")
def test_every_key_has_a_sentence(node: reference.Node) -> None:
    assert [key.name for key in node.keys if not key.text] == [], f"say it in the docstring of {node.target}"


def test_the_page_is_what_the_code_says() -> None:
    kept = Path(__file__).parents[3] / "docs/config.md"
    assert kept.read_text(encoding="utf-8") == page(NODES), "automodel options --markdown > docs/config.md"


def test_no_key_is_missing() -> None:
    """Against the shell completion, which walks the annotations of each bundled config by itself."""
    names = {key.name for node in NODES for key in node.keys}
    free = (
        "model.config",
        "rewards.",
        "data.task.",
        "model.tokenizer.",
        "parallelizer.mp_policy.",
        "rollout.environment.",
    )
    for name in ("sft", "dpo", "rm", "kd", "grpo"):
        found = {key for key in complete.keys(name) if not key.startswith(free)}
        assert found - {"pipeline.pipeline"} <= names  # from conf/pipeline/none.yaml, which is packed globally


def test_every_option_of_a_group_is_named_with_its_node() -> None:
    options = {(node.path, option) for node in NODES for option in node.options}
    for file in bundled.conf_dir().glob("*/*.yaml"):
        tree = yaml.safe_load(file.read_text())
        if isinstance(tree, dict) and "_target_" in tree and file.parent.name != "eval":  # roots, no options
            assert (file.parent.name, file.stem) in options


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("optimizer", ["optimizer.lr (required)   a number", "optimizer=adamw", "optimizer=muon"]),
        ("megatron_fsdp", ["parallelizer.zero_dp_strategy"]),
        ("seq_len", ["data.seq_len = 2048   a whole number"]),
        ("model.lora", ["model.lora.base_quantization = none   none or nf4"]),
    ],
)
def test_a_part_can_be_asked_for(section: str, expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["options", section]) == 0
    said = capsys.readouterr().out
    assert [text for text in expected if text not in said] == []


def test_a_misspelt_section_is_corrected(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["options", "optimiser"]) == 2
    assert "fix   automodel options optimizer" in capsys.readouterr().err


def test_it_is_quick_and_torch_free(tmp_path: Path) -> None:
    check_quick(tmp_path, 1.0, "torch,rich,transformers,hydra", "options")
