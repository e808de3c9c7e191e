"""The parser of a graph's text form (:mod:`optdnn.ir.text`), line by line."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np

from optdnn.dim import INF, Dim, DimLike, dim_max, dim_min, floordiv, mod, symbol
from optdnn.errors import ModelError
from optdnn.ir.graph import Graph, Value
from optdnn.ops.base import Attrs, Body, Stage
from optdnn.ops.table import OPDEFS
from optdnn.types import DTYPES, Array, TensorType

WORD = r"[A-Za-z_/][\w./-]*"
"""A value or node name that needs no quotes."""
SYMBOL = r"[A-Za-z_][\w.]*"
"""A symbol's name that needs no quotes."""
_STRING = r'"(?:[^"\\]|\\.)*"'
_NUMBER = r"\d+\.?\d*(?:[eE][-+]?\d+)?"


class Reader:
    """Builds ``graph`` from lines; see :mod:`optdnn.ir.text`."""

    def __init__(self, constants: Mapping[str, Array], outer: Reader | None = None, label: str = ""):
        self.graph = Graph()
        self.constants = constants
        self.outer, self.label = outer, label
        """For a body: the reader of what is around it, and its name there."""
        self.values: dict[str, Value] = {}
        self.symbols: dict[str, Dim] = {} if outer is None else outer.symbols
        self.bodies: dict[str, Body] = {} if outer is None else outer.bodies
        self.rest = ""

    # -------------------------------------------------------------- tokens

    def take(self, pattern: str) -> str | None:
        """The next token when it matches ``pattern``, else None."""
        found = re.match(rf"\s*({pattern})", self.rest)
        if found is None:
            return None
        self.rest = self.rest[found.end() :]
        return found.group(1)

    def expect(self, pattern: str, what: str) -> str:
        token = self.take(pattern)
        if token is None:
            raise ModelError(f"expected {what} before {self.rest.strip()[:20]!r}")
        return token

    def name(self, plain: str = WORD) -> str:
        token = self.expect(f"{_STRING}|{plain}", "a name")
        return str(json.loads(token)) if token.startswith('"') else token

    def names(self) -> list[str]:
        out = [self.name()]
        while self.take(","):
            out.append(self.name())
        return out

    def sequence(self, item: Any, close: str) -> list[Any]:
        """Comma-separated items up to and with ``close``."""
        out: list[Any] = []
        while not self.take(close):
            if out:
                self.expect(",", "a comma")
                if self.take(close):
                    break
            out.append(item())
        return out

    # -------------------------------------------------------------- lines

    def read(self, line: str) -> Reader:
        """Read a line; returns the reader of the next: another where a body begins or ends."""
        self.rest = line
        if line == "}":
            return self._end()
        if self.take(r"body(?=\s)"):
            return self._begin()
        keyword = self.take(r"(?:graph|symbol|input|const|output)(?=\s)")
        {
            "graph": self._graph,
            "symbol": self._symbol,
            "input": self._input,
            "const": self._const,
            "output": self._output,
            None: self._op,
        }[keyword]()
        self._nothing_left()
        return self

    def _nothing_left(self) -> None:
        if self.rest.strip():
            raise ModelError(f"unexpected {self.rest.strip()[:20]!r}")

    def _begin(self) -> Reader:
        label = self.expect(r"\w+", "the body's name")
        self.expect(r"\{", "'{'")
        self._nothing_left()
        if label in self.bodies:
            raise ModelError(f"body {label!r} is defined twice")
        return Reader(self.constants, self, label)

    def _end(self) -> Reader:
        from optdnn.ir.body import GraphBody  # whose digest is that of its text

        if self.outer is None:
            raise ModelError("there is no body that could end here")
        self.bodies[self.label] = GraphBody(self.graph)
        return self.outer

    def _graph(self) -> None:
        self.graph.name = self.name()

    def _symbol(self) -> None:
        name = self.name(SYMBOL)
        lo = int(self.expect(r"\d+", "a number"))
        self.expect(r"\.\.", "'..'")
        hi = self.take(r"\d+")
        self.symbols[name] = symbol(name, lo, INF if hi is None else int(hi))

    def _input(self) -> None:
        name = self.name()
        self.expect(":", "':'")
        self._define(name, self.graph.add_input(name, self.type()))

    def _const(self) -> None:
        name = self.name()
        self.expect(":", "':'")
        t = self.type()
        self.expect("=", "'='")
        if self.take("sha256:"):
            digest = self.expect(r"[0-9a-f]+", "a digest")
            if digest not in self.constants:
                raise ModelError(f"the array of constant {name!r} (digest {digest}) is not given")
            array = np.asarray(self.constants[digest])
            if (array.dtype, array.shape) != (t.dtype, t.shape):
                raise ModelError(f"constant {name!r} is {t!s}, the array given is {array.dtype}{list(array.shape)}")
        else:
            self.expect(r"\[", "'['")
            items = self.sequence(self.value, r"\]")
            if len(items) != t.size:
                raise ModelError(f"constant {name!r} is {t!s} and has {len(items)} values")
            array = np.array(items, np.float64 if t.dtype.kind not in "iub" else None).astype(t.dtype)
            array = array.reshape(t.static_shape)
        self._define(name, self.graph.add_constant(array, name, self.sources()))

    def _output(self) -> None:
        name = self.name()
        source = self.name() if self.take("=") else name
        self.graph.add_output(self.lookup(source), name)

    def _op(self) -> None:
        typed: list[tuple[str, TensorType | None]] = []
        while not typed or self.take(","):
            typed.append((self.name(), self.type() if self.take(":") else None))
        self.expect("=", "'='")
        kind = self.expect(r"\w+", "an operator kind")
        if kind not in OPDEFS:
            raise ModelError(f"unknown kind {kind!r}")
        self.expect(r"\(", "'('")
        operands = self.sequence(lambda: None if self.take(r"_(?![\w./-])") else self.lookup(self.name()), r"\)")
        attrs = self.attrs(kind)
        names = [n for n, _ in typed]
        op = self.graph.add(kind, operands, attrs, names=names, outputs=len(names), src=self.sources())
        outs = list(op.outputs)
        for i, (name, t) in enumerate(typed):
            if t is not None:
                _check(t, outs[i].type, name)
                outs[i] = replace(outs[i], type=t)
            self._define(name, Value(op.id, i))
        self.graph.set_op(replace(op, outputs=tuple(outs)))

    def _define(self, name: str, value: Value) -> None:
        if name in self.values:
            raise ModelError(f"{name!r} is defined twice")
        self.values[name] = value

    def lookup(self, name: str) -> Value:
        if name not in self.values:
            raise ModelError(f"{name!r} is not defined before it is used")
        return self.values[name]

    def sources(self) -> list[str]:
        return self.names() if self.take("<-") else []

    # -------------------------------------------------------------- types

    def type(self) -> TensorType:
        word = self.expect(r"\w+", "an element type")
        if word not in DTYPES:
            raise ModelError(f"unknown element type {word!r}")
        self.expect(r"\[", "'['")
        unknown = self.take(r"\?")
        dims = self.sequence(self.dim, r"\]")
        layout = self.expect(r"\w+", "a layout") if self.take("@") else ""
        return TensorType(DTYPES[word], None if unknown else tuple(dims), layout)

    def dim(self) -> DimLike:
        total: DimLike = -self.product() if self.take("-") else self.product()
        while sign := self.take(r"[-+]"):
            total = total + self.product() if sign == "+" else total - self.product()
        return total

    def product(self) -> DimLike:
        total = self.atom()
        while operator := self.take(r"\*|//|%"):
            right = self.atom()
            total = total * right if operator == "*" else (floordiv if operator == "//" else mod)(total, right)
        return total

    def atom(self) -> DimLike:
        if number := self.take(r"\d+"):
            return int(number)
        if self.take(r"\("):
            inner = self.dim()
            self.expect(r"\)", "')'")
            return inner
        if function := self.take(r"(?:min|max)(?=\()"):
            self.expect(r"\(", "'('")
            a, b = self.sequence(self.dim, r"\)")
            return dim_min(a, b) if function == "min" else dim_max(a, b)
        name = self.name(SYMBOL)
        return self.symbols.setdefault(name, symbol(name))

    # -------------------------------------------------------------- attributes

    def attrs(self, kind: str) -> Attrs:
        cls = OPDEFS[kind].attrs
        known = {f.name for f in fields(cls)}
        given: dict[str, Any] = {}
        while name := self.take(r"\w+(?==)"):
            if name not in known:
                raise ModelError(f"{kind} has no attribute {name!r}")
            self.expect("=", "'='")
            given[name] = self.value()
        try:
            return cls(**given)
        except TypeError as error:
            raise ModelError(f"attributes of {kind}: {error}") from None

    def value(self) -> Any:
        if token := self.take(_STRING):
            return json.loads(token)
        if self.take(r"\["):
            return tuple(self.sequence(self.stage, r"\]"))
        if self.take(r"complex\("):
            return complex(*self.sequence(self.value, r"\)"))
        if self.take(r"\("):
            return tuple(self.sequence(self.value, r"\)"))
        if self.take("@"):
            label = self.expect(r"\w+", "the name of a body")
            if label not in self.bodies:
                raise ModelError(f"body {label!r} is not defined before it is used")
            return self.bodies[label]
        sign = -1 if self.take("-") else 1
        if number := self.take(_NUMBER):
            return sign * (int(number) if number.isdigit() else float(number))
        word = self.expect(r"\w+", "a value")
        words = {"none": None, "true": True, "false": False, "inf": sign * np.inf, "nan": np.nan, **DTYPES}
        if word not in words:
            raise ModelError(f"unknown value {word!r}")
        return words[word]

    def stage(self) -> Stage:
        kind = self.expect(r"\w+", "a stage")
        if kind not in OPDEFS:
            raise ModelError(f"unknown kind {kind!r}")
        self.expect(r"\(", "'('")
        return Stage(kind, tuple(self.sequence(self.argument, r"\)")), self.attrs(kind))

    def argument(self) -> int | None:
        if self.take("_"):
            return None
        mark = self.expect(r"[%$]", "an operand ($k) or register (%k)")
        index = int(self.expect(r"\d+", "a number"))
        return ~index if mark == "%" else index


def _check(printed: TensorType, inferred: TensorType, name: str) -> None:
    """Raise ModelError where a printed type contradicts the inferred one."""
    ok = printed.dtype == inferred.dtype
    if ok and printed.shape is not None and inferred.shape is not None:
        ok = len(printed.shape) == len(inferred.shape) and all(
            a == b or not (isinstance(a, int) and isinstance(b, int))
            for a, b in zip(printed.shape, inferred.shape, strict=True)
        )
    if not ok:
        raise ModelError(f"{name!r} is written as {printed!s}, but is {inferred!s}")
