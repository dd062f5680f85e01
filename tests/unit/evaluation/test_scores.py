"""Scores against closed forms, and the nodes of an evaluation."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from automodel_cli.cli.main import run
from automodel_cli.config.check import check_config
from automodel_cli.config.composition import bundled_recipes
from automodel_cli.config.composition.compose import compose
from automodel_cli.config.errors import ConfigError
from automodel_cli.evaluation import reporting
from automodel_cli.evaluation.config import EvalConfig, Generation
from automodel_cli.evaluation.scores import TaskScores, interval, paired_difference, pass_at_k
from tests.errors import assert_error, raises


@pytest.mark.parametrize(("num_samples", "num_right"), [(5, 0), (5, 2), (5, 5), (4, 1)])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(num_samples: int, num_right: int) -> None:
    responses = [True] * num_right + [False] * (num_samples - num_right)
    for k in range(1, num_samples + 1):
        subsets = list(itertools.combinations(responses, k))
        assert pass_at_k(num_samples, num_right, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize(
    ("num_right", "num_questions", "low", "high"),
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_a_share_has_the_published_score_interval(num_right: int, num_questions: int, low: float, high: float) -> None:
    """Table I of Newcombe 1998 (Statistics in Medicine 17:857), method 3. At 100% it mirrors 0%."""
    values = [1.0] * num_right + [0.0] * (num_questions - num_right)
    assert interval(values, 10) == pytest.approx((low, high), abs=5e-5)
    assert interval([1.0 - value for value in values], 10) == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_a_mean_of_other_values_has_a_bootstrap() -> None:
    """1.96 standard errors around the mean, for many questions."""
    values = [0.75] * 300 + [0.25] * 700
    error = 1.96 * 0.5 * math.sqrt(0.3 * 0.7 / 1000)
    assert interval(values, 20_000) == pytest.approx((0.4 - error, 0.4 + error), abs=0.002)


def test_the_difference_of_shares_has_the_published_score_interval() -> None:
    """Newcombe 1998 (Statistics in Medicine 17:2635), method 10: 36, 12, 2 and 0 pairs; then no pair that differs."""
    ours, theirs = [1.0] * 48 + [0.0] * 2, [1.0] * 36 + [0.0] * 12 + [1.0] * 2
    assert paired_difference(ours, theirs, 10) == (pytest.approx(0.2), pytest.approx((0.0569, 0.3404), abs=5e-5))
    mean, (low, high) = paired_difference([1.0] * 3, [1.0] * 3, 10)
    assert mean == 0 and low < -0.5 and high > 0.5


def test_questions_that_a_judge_failed_on_are_told_and_count_nowhere() -> None:
    ours, theirs = [1.0, None, 0.0, 1.0], [1.0, 1.0, None, 0.0]
    outcome = TaskScores({"accuracy": ours, "reward": [0.5, None, 0.0, 1.0]})
    assert outcome.means == {"accuracy": pytest.approx(2 / 3), "reward": 0.5}
    assert outcome.line("days") == "days: accuracy 66.7%, reward 0.500 of 3 questions (1 more could not be judged)"
    assert paired_difference(ours, theirs, 10)[0] == 0.5  # of the first and the last
    nobody = TaskScores({"accuracy": [None, None]})
    assert nobody.line("days") == "days: accuracy n/a of 0 questions (2 more could not be judged)"


def test_a_paired_difference_does_not_widen_with_what_makes_questions_hard_for_both() -> None:
    """The difference is 0.1 everywhere, however much the questions differ; unpaired, its interval would be wide."""
    hardness = np.random.default_rng(0).random(200)
    mean, (low, high) = paired_difference((hardness + 0.1).tolist(), hardness.tolist(), 1000)
    assert (mean, low, high) == pytest.approx((0.1, 0.1, 0.1))


@pytest.mark.parametrize(
    "path", sorted((bundled_recipes.conf_dir() / "eval").glob("*.yaml")), ids=lambda path: path.stem
)
def test_bundled_evaluations_check(path: Path) -> None:
    assert isinstance(check_config(compose(path)), EvalConfig)


def test_samples_that_would_all_be_the_same_are_refused() -> None:
    with raises(ConfigError, "unsupported_combination", keys=("num_samples", "temperature"), values=(4, 0)):
        Generation(num_samples=4)
    with raises(ConfigError, "out_of_range", keys=("pass_at",), values=(2, 4), fix="num_samples=4"):
        Generation(num_samples=2, temperature=1.0, pass_at=[4])


def test_a_config_that_is_no_evaluation_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "some/model", "-c", str(bundled_recipes.recipe_path("quickstart"))]) == 2
    assert_error(capsys.readouterr().err, "wrong_recipe", values=("SFTRecipe",))


def test_a_model_has_no_held_out_rows_to_be_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["eval", "org/model", "-c", "quickstart"]) == 2
    fix = "'tasks.answers.data={path: <file>}'"
    assert_error(capsys.readouterr().err, "missing_key", "tasks.answers.data", values=("org/model",), fix=fix)
    (tmp_path / "export").mkdir()
    (tmp_path / "config.yaml").write_text("")
    assert run(["eval", str(tmp_path / "export"), "-c", "quickstart"]) == 2
    assert f"automodel eval {tmp_path} -c quickstart" in capsys.readouterr().err


def test_an_evaluation_prints_a_few_answers_beside_what_was_expected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """First those whose mark differs; a terminal gets no control character, and a long text is cut."""
    questions = [f"q{number}" for number in range(8)]
    ours = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, None, 0.5]
    said = ["\x1b[2Jred" + "x" * 10_000 if number == 4 else f"a\nb{number}" for number in range(8)]

    def outcome(values: list[float | None], answers: list[str]) -> TaskScores:
        together = zip(questions, answers, strict=True)
        items = [{"question": q, "answer": f"e{q[1:]}", "responses": [a, "other"]} for q, a in together]
        return TaskScores({"accuracy": values, "reward": values}, items)

    chosen = TaskScores(
        {"accuracy": [1.0]}, [{"question": "which?", "chosen": "B", "answer": "B", "scores": [0.0, 1.0]}]
    )
    found = {
        "run": {"task": outcome(ours, said), "choices": chosen},
        "before": {"task": outcome([1.0] + [0.0] * 7, ["no"] * 7 + [" "]), "choices": chosen},
    }
    reporting.report_results(found, tmp_path, tmp_path / "out.json", "", 10)
    printed = capsys.readouterr().out
    words = [line.split() for line in printed.splitlines()]
    asked = [line[1] for line in words if line[:1] == ["question"]]
    assert asked == ["q4", "q6", "q7", "which?"]
    assert [line[1] for line in words if line[:1] == ["expected"]] == ["e4", "e6", "e7", "B"]
    for wanted in (["before", "wrong", "no"], ["before", "wrong", "(empty)"], ["run", "right", "B"]):
        assert wanted in words
    assert ["run", "not", "judged", "a\\nb6"] in words and ["run", "0.5", "a\\nb7"] in words
    assert "\x1b" not in printed and "right  \\x1b[2Jredxxx" in printed
    assert max(map(len, printed.splitlines())) < 120
