"""Process of the tested code: runs it, then answers requests of the test process. It never sees a test.

Nothing here is a defense: the code controls this process. Only values leave it.
"""

from __future__ import annotations

import contextlib
import io
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

from protocol import Gone, Peer  # in the folder of this script

_COMPARE = "eq ne lt le gt ge contains"
_COMPUTE = "add sub mul truediv floordiv mod pow matmul and_ or_ xor lshift rshift neg pos invert index"
_OPERATORS = f"{_COMPARE} {_COMPUTE} getitem setitem delitem".split()
_OPS: dict[str, Callable[..., object]] = {
    **{name: getattr(operator, name) for name in _OPERATORS},
    "call": lambda function, /, *args, **kwargs: function(*args, **kwargs),
    "enter": lambda manager: manager.__enter__(),
    "exit": lambda manager: manager.__exit__(None, None, None),
    **{f.__name__: f for f in (getattr, setattr, delattr, len, iter, next, bool, str, repr, hash, int, float, abs)},
    **{f.__name__: f for f in (round, divmod, reversed, format, isinstance, dir)},
}
_MUTABLE = (list, dict, set, bytearray)


class Player(Peer):  # type: ignore[misc]
    """`objects` are the objects that the test process references. An object has one number."""

    def __init__(self, descriptor: int):
        super().__init__(descriptor)
        self._objects: list[object] = []
        self._numbers: dict[int, int] = {}
        self._main = types.ModuleType("__main__")
        self._ops: dict[str, Callable[..., object]] = {
            **_OPS,
            "load": self._load,
            "global": lambda name: vars(self._main)[name],
        }

    def hold(self, value: object) -> dict[str, object]:
        if isinstance(value, _Callback):
            return {"k": "back", "v": value.number}
        if id(value) not in self._numbers:
            self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)
        return {"k": "object", "v": self._numbers[id(value)]}

    def load(self, kind: str, number: int) -> object:
        return self._objects[number] if kind == "back" else _Callback(self, number)

    def answer(self, message: dict[str, Any]) -> dict[str, object]:
        out = io.StringIO()
        args = [self.decode(a) for a in message["args"]]
        try:
            with contextlib.redirect_stdout(out):
                value = self._ops[message["op"]](*args, **self.decode(message["kwargs"]))
            reply = {"value": self.encode(value)}
        except Gone:
            raise
        except BaseException as error:
            names = [kind.__name__ for kind in type(error).__mro__]
            reply = {"raised": names, "text": str(error)[:2000]}
        changed = {}
        for number, argument in enumerate(args):
            if isinstance(argument, _MUTABLE) and (now := self.encode(argument)) != message["args"][number]:
                changed[str(number)] = now
        return {**reply, "changed": changed, "printed": out.getvalue()}

    def _load(self, code: str) -> dict[str, list[str]]:
        """Run the code. Return its global names, each as module NAME, exception MRO..., or value."""
        sys.modules["__main__"] = self._main
        exec(compile(code, "completion", "exec"), vars(self._main))
        return {name: _kind(value) for name, value in list(vars(self._main).items()) if not name.startswith("__")}


def _kind(value: object) -> list[str]:
    match value:
        case types.ModuleType():
            return ["module", value.__name__]
        case type() if issubclass(value, Exception):
            return ["exception", *(kind.__name__ for kind in value.__mro__)]
    return ["value"]


class _Callback:
    """A function of the test, which stays in the test process."""

    def __init__(self, player: Player, number: int):
        self.player, self.number = player, number

    def __call__(self, *args: object, **kwargs: object) -> object:
        reply = self.player.ask("callback", self, *args, **kwargs)
        if "value" not in reply:
            raise RuntimeError(str(reply.get("text")))
        return self.player.decode(reply["value"])


if __name__ == "__main__":
    with contextlib.suppress(Gone):
        Player(int(sys.argv[1])).serve()
