"""Restrict sympy, and verifiers that call `eval`, to expressions.

`parse_expr` of sympy converts a text to Python and runs it, with access to all of sympy. `lambdify`, `preview` and
other functions run texts or programs. Only functions of mathematical answers are allowed here.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable

_MADE = ("Symbol", "Integer", "Float", "Rational", "Function", "factorial", "factorial2", "Tuple", "Matrix", "Eq")
_ELEMENTARY = (
    "sqrt cbrt root exp log ln Abs abs sign floor ceiling Mod Max Min max min re im conjugate gamma binomial erf"
)
_CIRCULAR = [
    f"{a}{name}{h}" for a in ("", "a") for name in ("sin", "cos", "tan", "cot", "sec", "csc") for h in ("", "h")
]
CALLABLE = frozenset((*_MADE, *_ELEMENTARY.split(), *_CIRCULAR, "atan2", "Add", "Mul", "Pow", "Integral", "Derivative"))
_EXPRESSION: tuple[type[ast.AST], ...] = (
    ast.Expression,
    ast.Constant,
    ast.Name,
    ast.Load,
    ast.BinOp,
    ast.UnaryOp,
    ast.Call,
    ast.keyword,
)
_EXPRESSION += (ast.Tuple, ast.List, ast.Set, ast.Dict, ast.operator, ast.unaryop, ast.Compare, ast.cmpop)
_MAX_CHARACTERS = 20_000


def check_expression(code: str, names: frozenset[str] = CALLABLE) -> None:
    """Raise ValueError for Python that is no expression of numbers, names, operators and calls of `names`."""
    if len(code) > _MAX_CHARACTERS:
        raise ValueError(f"an answer of {len(code):,} characters is no expression")
    try:
        tree = ast.parse(code.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"the answer is no expression: {error}") from error
    for node in ast.walk(tree):
        if not isinstance(node, _EXPRESSION):
            raise ValueError(f"the answer is code: {type(node).__name__} is no part of an expression")
        match node:
            case ast.Call() if not _may_be_called(node.func, names):
                raise ValueError(f"the answer is code: it calls {ast.unparse(node.func)[:60]}")
            case ast.Name() if "__" in node.id:
                raise ValueError(f"the answer is code: {node.id[:60]}")


def _may_be_called(function: ast.expr, names: frozenset[str]) -> bool:
    """Return whether a call is allowed: a listed name, or the result of `Symbol('f')` or `Function('f')`."""
    match function:
        case ast.Call(func=ast.Name(id="Symbol" | "Function")):
            return True
        case ast.Name():
            return function.id in names
    return False


def plain_eval(code: str, *scopes: object) -> object:
    """`eval` of literals and arithmetic."""
    check_expression(code, frozenset())
    return eval(code, {"__builtins__": {}})


@functools.cache
def guard_sympy() -> None:
    """Check all expressions that sympy evaluates in this process from now on. Raises ImportError if it is not
    installed."""
    from sympy.parsing import sympy_parser

    made: Callable[..., str] = sympy_parser.stringify_expr

    @functools.wraps(made)
    def checked(*args: object, **kwargs: object) -> str:
        code = made(*args, **kwargs)
        check_expression(code)
        return code

    sympy_parser.stringify_expr = checked


def guard_eval(package: str) -> None:
    """Let every loaded module of a package that calls `eval` call `plain_eval`."""
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            vars(module)["eval"] = plain_eval
