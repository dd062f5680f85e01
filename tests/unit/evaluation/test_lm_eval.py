"""lm-evaluation-harness: how it is called, and what is read of what it wrote (vectors/harness: lm-eval 0.4.13)."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from automodel_cli.cli.main import run as command_line
from automodel_cli.config.errors import ConfigError, RunError
from automodel_cli.evaluation.lm_eval import Harness, options_of, read_lm_eval_scores
from tests.errors import raises

WRITTEN = Path(__file__).parents[2] / "vectors" / "harness"


def test_a_value_a_question_in_the_order_of_the_questions() -> None:
    found = read_lm_eval_scores(WRITTEN)
    assert sorted(found) == ["days_mc", "days_qa"]
    assert found["days_mc"].measures == {"acc": [1.0, 1.0, 0.0, 1.0]}  # the lines stand the other way round
    assert found["days_qa"].measures == {"exact_match": [1.0, 0.0, 0.0, 1.0]}
    assert all("Which day" in item["question"] for item in found["days_qa"].items)
    chosen, said = found["days_mc"].items, found["days_qa"].items
    assert [float(item["chosen"] == item["answer"]) for item in chosen] == [1.0, 1.0, 0.0, 1.0]
    assert [float(item["responses"] == [item["answer"]]) for item in said] == [1.0, 0.0, 0.0, 1.0]


def test_filters_are_measures_of_their_own_and_pairs_are_left_out(tmp_path: Path) -> None:
    common = {"arguments": {"gen_args_0": {"arg_0": "2 + 2?"}}, "target": "4", "filtered_resps": ["4"], "doc_id": 0}
    rows = [
        {**common, "filter": "strict", "metrics": ["exact_match", "word_perplexity"], "exact_match": 0.0},
        {**common, "filter": "loose", "metrics": ["exact_match"], "exact_match": 1.0},
    ]
    rows[0]["word_perplexity"] = [-3.5, 4]
    (tmp_path / "samples_my_task_2026.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_lm_eval_scores(tmp_path)["my_task"].measures == {
        "exact_match, strict": [0.0],
        "exact_match, loose": [1.0],
    }
    with raises(RunError, "nothing_to_compare"):
        read_lm_eval_scores(tmp_path / "nothing")


def test_options_go_to_lm_eval_and_a_chat_template_is_used_where_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    harness = Harness("py", ("a", "b"), tmp_path, options_of(["num_fewshot=5", "batch_size=2"]))
    command = " ".join(harness._command(str(tmp_path), Path("out")))
    for part in ("py -m lm_eval run --log_samples --apply_chat_template --model hf", "--tasks a,b", "--batch_size 2"):
        assert part in command
    assert f"--include_path {tmp_path}" in command and "--num_fewshot 5" in command
    plain = Harness("py", ("a",), None, options_of(["apply_chat_template=false"]))
    assert "apply_chat_template" not in " ".join(plain._command(str(tmp_path), Path("out")))
    with raises(ConfigError, "invalid_value", keys=("--harness",), values=("--limit",)):
        options_of(["--limit"])


def test_what_is_missing_is_said_before_a_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert command_line(["eval", str(tmp_path)]) == 2
    assert "one of -c EVAL and --harness TASKS" in capsys.readouterr().err
    shutil.copy("/bin/false", tmp_path / "python")
    assert command_line(["eval", str(tmp_path), "--harness", "a", "--harness-python", str(tmp_path / "python")]) == 2
    assert "-m pip install 'lm-eval[hf]'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="pip install 'lm-eval[hf]'")
def test_the_harness_itself_judges_a_model(tmp_path: Path) -> None:
    from automodel_cli.models.tokenizer import ByteTokenizer
    from tests import tiny

    tokenizer = ByteTokenizer().build()
    tiny.build_hf("llama", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"q": f"{n}?", "a": n % 2}) + "\n" for n in range(6)))
    (tmp_path / "even.yaml").write_text(
        f"task: even\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: ["even", "odd"]\n'
        'doc_to_target: "{{a}}"\nmetric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]\n'
    )
    found = Harness(sys.executable, ("even",), tmp_path, {}).run(str(tmp_path / "model"))
    assert len(found["even"].measures["acc"]) == 6 and set(found["even"].measures["acc"]) <= {0.0, 1.0}
