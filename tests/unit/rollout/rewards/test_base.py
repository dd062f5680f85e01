"""Rewards: each on cases with a known answer, what happens when one raises or hangs, foreign code in its sandbox."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from typing import ClassVar

import pytest

from automodel_cli.config.errors import ConfigError
from automodel_cli.rollout.rewards import safe_eval
from automodel_cli.rollout.rewards.aggregate import RewardSum
from automodel_cli.rollout.rewards.base import Reward, RewardInput
from automodel_cli.rollout.rewards.code import CodeExecution
from automodel_cli.rollout.rewards.math import MathEquivalence
from automodel_cli.rollout.rewards.reasoning import ReasoningReward, ReasoningTasks
from automodel_cli.rollout.rewards.safe_eval import guard_sympy
from automodel_cli.rollout.rewards.sandbox import linux_isolation
from automodel_cli.rollout.rewards.sandbox.host import Limits, isolation, run_python
from automodel_cli.rollout.rewards.text import ExactAnswer, FormatRegex, FunctionReward, Length
from tests.errors import raises

ISOLATED = {"files", "network", "processes"} <= isolation()
needs_isolation = pytest.mark.skipif(not ISOLATED, reason="this machine gives no user namespaces")


def judged(completion="", answer="", name="sample 0", **fields):
    row = {"answer": answer, **fields.pop("row", {})}
    return RewardInput(name, completion, row, **fields)


@pytest.mark.parametrize(
    ("reward", "completion", "answer", "expected"),
    [
        (ExactAnswer(), " 42\n", "42", 1),
        (ExactAnswer(), "42.", "42", 0),
        (ExactAnswer(), "Paris", "paris", 0),
        (ExactAnswer(ignore_case=True), "Paris", "paris", 1),
        (ExactAnswer(pattern=r"#### (.+)"), "#### 41 no, #### 1\nso\n#### 42", "42", 1),
        (ExactAnswer(pattern=r"####\s*(\d+)"), "the answer is 42", "42", 0),
        (FormatRegex(pattern=r"<think>.*</think>\s*\d+"), "<think>a\nb</think>\n7\n", "", 1),
        (FormatRegex(pattern=r"<think>.*</think>\s*\d+"), "7", "", 0),
    ],
)
def test_text_rewards(reward, completion, answer, expected):
    assert reward.score(judged(completion, answer)) == expected


def test_an_unfinished_answer_is_wrong():
    assert ExactAnswer().score(judged("42", "42", finished=False)) == 0
    assert ExactAnswer(require_eos=False).score(judged("42", "42", finished=False)) == 1


@pytest.mark.parametrize(("num_tokens", "expected"), [(0, 0), (10, 0), (15, -0.5), (20, -1), (99, -1)])
def test_length(num_tokens, expected):
    assert Length(soft_limit=10, max_tokens=20).score(judged(num_tokens=num_tokens)) == expected


@pytest.mark.parametrize(
    ("make", "code", "key"),
    [
        (lambda: ExactAnswer(pattern="("), "invalid_value", "pattern"),
        (lambda: ExactAnswer(pattern="no group"), "invalid_value", "pattern"),
        (lambda: FormatRegex(pattern="["), "invalid_value", "pattern"),
        (lambda: Length(soft_limit=5, max_tokens=5), "out_of_range", "soft_limit"),
        (lambda: ExactAnswer(on_error="ignore"), "invalid_choice", "on_error"),
        (lambda: ExactAnswer(timeout=0), "out_of_range", "timeout"),
        (lambda: CodeExecution(timeout=None), "empty_value", "timeout"),
        (lambda: RewardSum({}), "missing_key", "rewards"),
        (lambda: RewardSum({"a": ExactAnswer(weight=0)}), "nothing_to_train", "rewards"),
    ],
)
def test_wrong_values_are_refused(make, code, key):
    with raises(ConfigError, code, keys=(key,)):
        make()


def closeness(completion, answer, *, scale=1.0, hint="none"):
    return -abs(int(completion) - int(answer)) * scale + (hint == "yes")


def everything(completion, kind, **rest):
    return float(completion == kind and rest == {"answer": "7", "scale": 5})


ROW = {"answer": "7", "kind": "k", "scale": 5}


@pytest.mark.parametrize(
    ("function", "row", "completion", "expected"),
    [
        (closeness, {"answer": "7"}, "4", -3.0),
        (closeness, {"answer": "7", "hint": "yes"}, "4", -2.0),
        (functools.partial(closeness, scale=2.0), ROW, "4", -6.0),  # what the config says, not the column of that name
        (everything, ROW, "k", 1.0),
        (lambda text, row: float(row["kind"] == text), ROW, "k", 1.0),
        (lambda text: len(text), ROW, "four", 4.0),
    ],
)
def test_a_function_is_given_the_columns_that_its_parameters_name(function, row, completion, expected):
    assert FunctionReward(function=function).score(RewardInput("s", completion, row)) == expected


def test_columns_without_a_default_are_those_that_every_row_must_have():
    assert FunctionReward(function=closeness).columns == ("answer",)
    assert FunctionReward(function=everything).columns == ("kind",)
    assert FunctionReward(function=shout).columns == ()


async def waits(completion):
    return 1.0


@pytest.mark.parametrize(
    ("function", "code", "value"),
    [
        (lambda completions, **columns: [1.0], "invalid_value", "completions"),
        (lambda prompts, completions, **columns: [1.0], "invalid_value", "completions"),
        (lambda: 1.0, "invalid_value", "no completion"),
        (waits, "not_supported", "waits"),
        (lambda prompt, completion: 1.0, "invalid_value", "prompt"),
    ],
)
def test_functions_that_are_called_otherwise_are_refused(function, code, value):
    with raises(ConfigError, code, keys=("function",), values=(value,)):
        FunctionReward(function=function)


def shout(completion, row):
    if completion == "raise":
        raise ValueError("do not like it")
    if completion == "hang":
        time.sleep(60)
    if completion == "nan":
        return float("nan")
    return len(completion)


def test_the_sum_is_weighted_and_keeps_the_order():
    with RewardSum({"exact": ExactAnswer(weight=2), "long": FunctionReward(function=shout, weight=0.5)}) as rewards:
        scores = rewards([judged("12", "12"), judged("123", "4")])
    assert [s.total for s in scores] == [3.0, 1.5]
    assert scores[0].parts == {"exact": 1.0, "long": 2.0} and all(s.valid and not s.errors for s in scores)


@pytest.mark.parametrize(
    ("on_error", "total", "valid"), [("zero", 1.0, True), ("fail", 0.0, True), ("skip", 1.0, False)]
)
def test_a_reward_that_raises_counts_as_configured(on_error, total, valid, caplog):
    rewards = RewardSum({"exact": ExactAnswer(), "mine": FunctionReward(function=shout, on_error=on_error)})
    samples = [judged(text, text, name=f"step 3 prompt {i}") for i, text in enumerate(["raise", "ok", "nan"])]
    bad, good, not_finite = rewards(samples)
    assert (bad.total, bad.valid) == (not_finite.total, not_finite.valid) == (total, valid)
    assert bad.errors == {"mine": "ValueError: do not like it"} and "no finite number" in not_finite.errors["mine"]
    assert (good.total, good.valid) == (3.0, True)
    assert "mine of step 3 prompt 0: ValueError: do not like it" in caplog.text


def test_a_hanging_reward_is_killed_and_the_next_sample_judged():
    with RewardSum({"mine": FunctionReward(function=shout, timeout=2.0)}, num_helpers=1) as rewards:
        started = time.monotonic()
        scores = rewards([judged("hang"), judged("four"), judged("raise")])
        assert time.monotonic() - started < 50
    assert "no result within 2 s" in scores[0].errors["mine"]
    assert scores[1].total == 4.0 and scores[2].errors == {"mine": "ValueError: do not like it"}


def test_a_catastrophic_pattern_does_not_hang_the_run():
    with RewardSum({"format": FormatRegex(pattern=r"(a+)+b", timeout=1.0)}, num_helpers=1) as rewards:
        (score,) = rewards([judged("a" * 40)])
    assert "no result within 1 s" in score.errors["format"]


def test_the_answer_behind_a_solution():
    pytest.importorskip("math_verify")
    reward = MathEquivalence(answer_pattern=r"####\s*(.+)")
    solution = "48/2 = 24 clips.\n#### 1,024"
    assert reward.score(judged("so it is $1024$", solution)) == 1
    assert reward.score(judged("so it is $24$", solution)) == 0
    with pytest.raises(ValueError, match="not in the answer"):
        reward.score(judged("24", "24"))
    with raises(ConfigError, "invalid_value", keys=("answer_pattern",), values=("####",)):
        MathEquivalence(answer_pattern="####")


def test_mathematical_equivalence():
    pytest.importorskip("math_verify")
    cases = {
        ("so it is $\\frac{1}{2}$", "0.5"): 1,
        ("The answer is \\boxed{2\\sqrt{2}}", "\\sqrt{8}"): 1,
        ("\\boxed{x^2+2x+1}", "(x+1)^2"): 1,
        ("\\boxed{3}", "4"): 0,
        ("no idea", "4"): 0,
    }
    with RewardSum({"math": MathEquivalence(timeout=60)}, num_helpers=1) as rewards:
        scores = rewards([judged(said, answer) for said, answer in cases])
    assert [(s.total, s.errors) for s in scores] == [(expected, {}) for expected in cases.values()]


def test_reasoning_tasks_bring_their_verifier():
    pytest.importorskip("reasoning_gym")
    task = ReasoningTasks("leg_counting", num_train=20, num_validation=5)
    train, validation = list(task.rows("train")), list(task.rows("validation"))
    assert (len(train), len(validation)) == (20, 5) and train == list(task.rows("train"))
    questions = {row["messages"][0]["content"] for row in train}
    assert not questions & {row["messages"][0]["content"] for row in validation}
    with RewardSum({"legs": ReasoningReward(timeout=60)}, num_helpers=1) as rewards:
        row = validation[0]
        right, wrong = rewards([judged(row["answer"], row=row), judged("-1", row=row)])
    assert right.total == 1.0 and wrong.total < 0.1 and not right.errors
    assert task.cache_key() != ReasoningTasks("leg_counting", seed=1).cache_key()
    with raises(ConfigError, "unknown_name", keys=("task",), values=("no_such_task",)):
        list(ReasoningTasks("no_such_task").rows("train"))


@dataclass(frozen=True, kw_only=True)
class Evaluates(Reward):
    """A verifier that evaluates what it is given."""

    confined: ClassVar[bool] = True

    timeout: float | None = 60.0

    def score(self, sample):
        return eval(sample.completion)


def test_a_verifier_that_evaluates_an_answer_can_do_nothing_else(tmp_path, monkeypatch):
    """A completion that takes the verifier's process over finds no way on, to other samples neither."""
    monkeypatch.setenv("MY_SECRET_KEY", "sk-secret")
    if linux_isolation.libc.syscall(444, None, 0, 1) < 3:
        pytest.skip("this kernel has no Landlock")
    marker = tmp_path / "ran"
    attacks = [
        f"__import__('os').system('touch {marker}') == 0",
        f"__import__('pathlib').Path('{marker}').touch()",
        "__import__('socket').socket() and 1",
        "__import__('os').kill(__import__('os').getppid(), 9)",
        "__import__('os').fork()",
        "open(f'/proc/{__import__(\"os\").getppid()}/mem', 'r+b') and 1",
        f"__import__('os').chmod('{tmp_path}', 0o700) or 1",
        "len(open('/etc/passwd').read())",
        "len(open('/proc/self/environ').read())",
        "len(__import__('os').environ['MY_SECRET_KEY'])",
        "__import__('resource').prlimit(__import__('os').getppid(), 0, (1, 1)) and 1",
        "(_ for _ in ()).throw(SystemExit(1))",
        "__import__('os')._exit(0)",
    ]
    with RewardSum({"evaluates": Evaluates()}, num_helpers=1) as rewards:
        scores = rewards([judged(said) for said in (*attacks, "1 + 1")])
    assert not marker.exists() and [s.total <= 0 for s in scores[:-1]] == [True] * len(attacks), scores
    assert scores[-1].total == 2


def test_what_an_answer_does_to_its_process_reaches_no_other_sample():
    forges = "setattr(__import__('builtins'), 'eval', lambda *given: 7.0) or 7.0"
    with RewardSum({"evaluates": Evaluates()}, num_helpers=1) as rewards:
        forged, honest = rewards([judged(forges), judged("1")])
    assert (forged.total, honest.total) == (7, 1)


def test_a_verifier_that_does_not_end_is_ended_for_its_sample_alone():
    with RewardSum({"evaluates": Evaluates(timeout=0.5)}, num_helpers=1) as rewards:
        assert rewards([judged("1")])[0].total == 1  # the helper has started
        began = time.monotonic()
        slow, quick = rewards([judged("__import__('time').sleep(60)"), judged("3")])
        assert "0.5 s" in slow.errors["evaluates"] and quick.total == 3
        assert time.monotonic() - began < 20


_SPELLED = "+".join(f"chr({ord(c)})" for c in "__import__('os')._exit(0)")


@pytest.mark.parametrize(
    "said",
    [
        f"lambdify((), {_SPELLED})()",
        "lambdify((), '('+'_'+'_'+'import'+'_'+'_'+'(\"os\").getpid())')()",
        "preview(x)",
        "x.func",
        "sympify('1')",
        "S('1')",
        "[y for y in (1,)]",
        "(lambda: 1)()",
        "x if y else z",
        "f'{x}'",
        "input()",
        "factorint(10**90)",
        "1+" * 20_000 + "1",
    ],
)
def test_sympy_evaluates_expressions_only(said):
    pytest.importorskip("sympy")
    guard_sympy()
    from sympy import parse_expr

    with pytest.raises(ValueError, match=r"code|expression"):
        parse_expr(said)


@pytest.mark.parametrize(
    "said",
    ["x**2/2 + C", "2*sin(x)*exp(-x) + log(3*x)/sqrt(2)", "-3", "1.5e3", "(2 + 3)*4 - 1", "f(x) + y", "5!", "asinh(x)"],
)
def test_sympy_reads_what_it_read(said):
    sympy = pytest.importorskip("sympy")
    from sympy.parsing import sympy_parser as parser

    guard_sympy()
    rules = parser.standard_transformations
    now = parser.parse_expr(said, transformations=rules)
    unchecked = parser.stringify_expr.__wrapped__(said, {}, vars(sympy).copy(), rules)
    assert now == eval(unchecked, vars(sympy).copy(), {})


@pytest.mark.parametrize(
    "said", ["__import__('os')", "a.b", "f()", "[].x", "(lambda: 1)()", "[i for i in ()]", "{**{}}()"]
)
def test_a_verifiers_own_eval_reads_literals_only(said):
    with pytest.raises(ValueError, match=r"code|expression"):
        safe_eval.check_expression(said, frozenset())
    assert safe_eval.plain_eval("[['a', 1], -2, {'b': (3 << 2)}]") == [["a", 1], -2, {"b": 12}]


@pytest.mark.parametrize("said", ["__import__('os').getpid()", "exec('x')", "open('/etc/passwd')", "getattr(1, 'x')"])
def test_an_answer_that_sympy_would_run_is_refused(said):
    """reasoning-gym hands some answers to sympy, which evaluates them as Python."""
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match="is code"):
        ReasoningReward().score(judged(said, row={"entry": {"metadata": {"source_dataset": "countdown"}}}))


ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."


@needs_isolation
@pytest.mark.parametrize(
    ("completion", "tests", "expected"),
    [
        (ADD, "assert add(1, 2) == 3", 1.0),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 0.5),
        ("print(int(input()) * 2)", {"stdin": "21\n", "stdout": "42"}, 1.0),
        ("print(41)", {"stdin": "", "stdout": "42"}, 0.0),
        ("import sys; sys.exit(0)", "assert False", 0.0),  # leaving before the test is no success
        ("this is no python", "assert True", 0.0),
    ],
)
def test_code_is_judged_by_its_tests(completion, tests, expected):
    assert CodeExecution().score(judged(completion, row={"tests": tests})) == expected


@needs_isolation
@pytest.mark.parametrize(
    ("code", "sign"),
    [
        ("import socket; socket.create_connection(('127.0.0.1', 22), 2)", "Error"),
        ("open('/tmp/escaped', 'w')", "No such file or directory"),
        ("open('/usr/escaped', 'w')", "Error"),
        ("import ctypes; print(ctypes.CDLL(None).umount2(b'/proc', 2)); open('/etc/escaped', 'w')", "Error"),
        ("x = bytearray(10**9)", "MemoryError"),
        ("import os, time\nfor _ in range(40):\n    if os.fork() == 0: time.sleep(9); break", "BlockingIOError"),
        ("open('big', 'wb').write(b'0' * 10**8)", "Error"),
    ],
)
def test_the_sandbox_holds(code, sign):
    outcome = run_python(code, limits=Limits(memory_bytes=256 * 2**20))
    assert outcome.returncode not in (0, None) or outcome.timed_out
    assert sign in outcome.stderr, outcome


@needs_isolation
@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(60)"])
def test_time_ends_everything(code):
    started = time.monotonic()
    assert run_python(code, limits=Limits(seconds=0.5)).timed_out
    assert time.monotonic() - started < 20


def test_a_machine_without_isolation_is_refused(monkeypatch, caplog):
    monkeypatch.setattr("automodel_cli.rollout.rewards.sandbox.host.isolation", lambda: frozenset({"processes"}))
    with raises(ConfigError, "not_isolated", keys=("allow_unisolated",), values=("files, network, memory",)):
        RewardSum({"code": CodeExecution()})
    RewardSum({"code": CodeExecution(allow_unisolated=True)})
    assert "[not_isolated]" in caplog.text
