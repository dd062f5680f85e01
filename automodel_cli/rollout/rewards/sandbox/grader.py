"""Process that runs one test. Names of the tested code are proxies of objects in the other process.

Every comparison happens here. Values of the tested code arrive as plain data of the types of `protocol.py`. Remote
objects may be equal to each other if their code says so, but never to a value of the test. The last line of the output
is the verdict.
"""

from __future__ import annotations

import builtins
import importlib
import io
import itertools
import json
import sys
import types
from collections.abc import Callable
from typing import Any

from protocol import Gone, Peer  # in the folder of this script


class Judge(Peer):  # type: ignore[misc]
    """Asks the completion's process. `callbacks` are functions of the test that it may call."""

    def __init__(self, descriptor: int):
        super().__init__(descriptor)
        self._remote: dict[int, Remote] = {}
        self._callbacks: list[Callable[..., object]] = []
        self._exceptions: dict[str, type[Exception]] = {}

    def hold(self, value: object) -> dict[str, object]:
        if isinstance(value, Remote):
            return {"k": "back", "v": object.__getattribute__(value, "_number")}
        if not callable(value) or isinstance(value, type):
            raise TypeError(
                f"the test hands the code {type(value).__name__!r}, which is neither plain data nor a function"
            )
        self._callbacks.append(value)
        return {"k": "call", "v": len(self._callbacks) - 1}

    def load(self, kind: str, number: int) -> object:
        if kind == "back":
            return self._callbacks[number]
        return self._remote.setdefault(number, Remote(self, number))

    def answer(self, message: dict[str, Any]) -> dict[str, object]:
        """Handle a request of the tested code: it may only call functions of the test."""
        if message["op"] != "callback":
            raise Gone
        try:
            function, *args = (self.decode(a) for a in message["args"])
            return {"value": self.encode(function(*args, **self.decode(message["kwargs"])))}
        except Gone:
            raise
        except Exception as error:
            return {"text": f"{type(error).__name__}: {error}"}

    def do(self, op: str, *args: object, **kwargs: object) -> Any:
        """Run an operation in the other process. Its exceptions are raised here, its output is printed here, and
        changes of arguments are applied here."""
        reply = self.ask(op, *args, **kwargs)
        sys.stdout.write(str(reply.get("printed", "")))
        for number, now in dict(reply.get("changed") or {}).items():
            _become(args[int(number)], self.decode(now))
        if "value" in reply:
            return self.decode(reply["value"])
        raise self._exception([str(name) for name in reply.get("raised") or ()])(str(reply.get("text")))

    def bind(self, code: str, names: set[str], entry_point: str | None) -> dict[str, object]:
        """Run the tested code in the other process, and return the meaning of the names that the test uses."""
        loaded = self.do("load", code)
        bound: dict[str, object] = {}
        for name in names & set(loaded):
            if hasattr(builtins, name) and name != entry_point:
                continue  # the tested code must not redefine `all` or `isinstance` in a test
            what, *details = loaded[name]
            if what == "module" and details[0] == name and name in sys.stdlib_module_names:
                # Only a module that the test itself names: the completion chooses the name of any other, and modules
                # such as `unittest.__main__` run and exit when they are imported.
                bound[name] = importlib.import_module(name)
            elif what == "exception":
                bound[name] = self._exception(details)
            else:
                bound[name] = self.do("global", name)
        return bound

    def _exception(self, names: list[str]) -> type[Exception]:
        """Return the built-in exception of that name, or a class derived from the nearest built-in one. Exceptions that
        would end the process are excluded."""
        for i, name in enumerate(names):
            known = getattr(builtins, name, None)
            if isinstance(known, type) and issubclass(known, Exception):
                if i == 0:
                    return known
                return self._exceptions.setdefault(names[0], type(names[0], (known,), {}))
        return RuntimeError


def _become(old: Any, new: Any) -> None:
    """Change a list, dict, set or bytearray into another in place."""
    if type(old) is not type(new):
        raise Gone
    if isinstance(old, (list, bytearray)):
        old[:] = new
    else:
        old.clear()
        old.update(new)


class Remote:
    """An object of the completion."""

    def __init__(self, judge: Judge, number: int):
        object.__setattr__(self, "_judge", judge)
        object.__setattr__(self, "_number", number)
        object.__setattr__(self, "_told", False)

    def __getattr__(self, name: str) -> object:
        return _do(self, "getattr", name)

    def __setattr__(self, name: str, value: object) -> None:
        _do(self, "setattr", name, value)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Remote) and bool(_do(self, "eq", other)))

    def __hash__(self) -> int:
        return int(_do(self, "hash"))


def _do(remote: Remote, op: str, *args: object, **kwargs: object) -> Any:
    return object.__getattribute__(remote, "_judge").do(op, remote, *args, **kwargs)


def _forward(op: str, swap: bool = False) -> Callable[..., object]:
    def method(self: Remote, *args: object, **kwargs: object) -> object:
        if swap:
            return object.__getattribute__(self, "_judge").do(op, args[0], self)
        return _do(self, op, *args, **kwargs)

    return method


def _ordering(op: str) -> Callable[..., object]:
    """Against a value of the test an order would be the completion's verdict."""

    def method(self: Remote, other: object) -> object:
        return _do(self, op, other) if isinstance(other, Remote) else NotImplemented

    return method


def _arithmetic(op: str, swap: bool = False) -> Callable[..., object]:
    """Return a method for arithmetic with a value of the test. The other process receives the value, which may be the
    expected result (`f(2) - 3.0`). Therefore its answer must remain a remote object and is not converted to a
    number."""

    def method(self: Remote, other: object) -> object:
        judge = object.__getattribute__(self, "_judge")
        result = judge.do(op, *((other, self) if swap else (self, other)))
        if not isinstance(other, Remote):
            if not isinstance(result, Remote):
                raise TypeError(f"an object of the code computed a {type(result).__name__} from a value of the test")
            object.__setattr__(result, "_told", True)
        return result

    return method


def _number(op: str) -> Callable[..., object]:
    def method(self: Remote, *args: object) -> object:
        if object.__getattribute__(self, "_told"):
            raise TypeError("an object of the code that has seen a value of the test is no number")
        return _do(self, op, *args)

    return method


def _no_verdict(self: Remote, item: object) -> bool:
    raise TypeError("`in` on an object of the code would leave the verdict to the code")


_SAME = "call len iter next str repr getitem setitem delitem enter reversed format neg pos invert"
_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift divmod"
_METHODS: dict[str, Callable[..., object]] = {
    **{name: _forward(name) for name in _SAME.split()},
    **{name: _ordering(name) for name in ("lt", "le", "gt", "ge")},
    **{name: _number(name) for name in ("bool", "int", "float", "index", "abs", "round")},
    "contains": _no_verdict,
    "exit": lambda self, *exc: _do(self, "exit"),
    "instancecheck": _forward("isinstance", swap=True),
}
for _name in _ARITHMETIC.split():
    _op = f"{_name}_" if _name in ("and", "or") else _name
    _METHODS |= {_name: _arithmetic(_op), f"r{_name}": _arithmetic(_op, swap=True)}
for _name, _method in _METHODS.items():
    setattr(Remote, f"__{_name}__", _method)


def global_names(code: types.CodeType) -> set[str]:
    """Every name that a piece of code, or a function in it, may look up globally."""
    inner = (c for c in code.co_consts if isinstance(c, types.CodeType))
    return set(itertools.chain(code.co_names, *(global_names(c) for c in inner)))


def verdict(descriptor: int, code: str, test: str, entry_point: str | None) -> dict[str, Any]:
    """Return `passed`, `failed` with a reason, or `broken` if the test itself cannot run."""
    try:
        compiled = compile(test, "test", "exec")
    except (SyntaxError, ValueError) as error:
        return {"broken": f"the test is no Python: {error}"}
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    try:
        vars(main).update(Judge(descriptor).bind(code, global_names(compiled), entry_point))
    except BaseException as error:  # an exit too: the test has not run yet
        return _failure(error)
    try:
        exec(compiled, vars(main))
    except SystemExit as error:  # the test's own, as of unittest.main(): the completion's does not cross
        return {"passed": True} if not error.code else {"failed": f"the test exits with {error.code}"}
    except BaseException as error:
        return _failure(error)
    return {"passed": True}


def _failure(error: BaseException) -> dict[str, str]:
    if isinstance(error, Gone):
        return {"failed": "the code ended its process, or ran out of time or memory"}
    return {"failed": f"{type(error).__name__}: {error}"[:500]}


def _main() -> None:
    task = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, io.StringIO()
    descriptor, sys.argv = int(sys.argv[1]), ["test"]
    result = verdict(descriptor, task["code"], task["test"], task["entry_point"])
    out.write(json.dumps(result))
    out.flush()


if __name__ == "__main__":
    _main()
