"""A readable text form of a graph, for numbered dumps and bug reports. Equal graphs have equal text.

::

    graph "net"
    symbol N 1..8
    input x: fp32[N, 3, 8, 8]
    const w: fp32[4, 3, 3, 3] = sha256:9f86d081884c7d65
    const b: fp32[4] = [0.0, 0.5, 1.0, 1.5]
    c: fp32[N, 4, 6, 6] = Conv(x, w, b, z) strides=(1, 1) epilogue=[Add(%0, $3), Clip(%1, _, $4), Relu(%2)] <- conv1, relu1
    output y = c

Branches and loops have bodies, which come first, each under the digest of its own text::

    body 5b1f6d0a93c4e827 {
    graph "body"
    input going: bool[]
    input s: fp32[2]
    r: fp32[2] = Add(s, s)
    output going
    output r
    }
    y: fp32[2] = Loop(trips, _, x) body=@5b1f6d0a93c4e827 carried=1

One line per op, operands before users. ``_`` is an absent operand; attributes that have their default are left out; in a
fused stage ``%k`` is register k and ``$k`` operand slot k. ``<-`` gives the ONNX nodes an op came from. Names that are not
plain words are quoted as in JSON. Large constants show a digest.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from optdnn.dim import INF, Symbol
from optdnn.errors import InternalError
from optdnn.ir.graph import ConstantAttrs, Graph, Op, Value
from optdnn.ops.base import Attrs, Body, Stage
from optdnn.types import Array, dtype_name

INLINE_ELEMENTS = 16
_WORD = r"[A-Za-z_/][\w./-]*"
"""A value or node name that needs no quotes."""
_KEYWORDS = frozenset({"graph", "symbol", "input", "const", "output", "body", "_"})
_digests: WeakKeyDictionary[ConstantAttrs, str] = WeakKeyDictionary()


def to_text(graph: Graph) -> str:
    """The graph as text. Equal graphs give equal text, whatever their ids are."""
    lines = [f"graph {json.dumps(graph.name)}"]
    for digest, inner in bodies(graph).items():
        lines += [f"body {digest} {{", *_lines(inner), "}"]
    return "\n".join(lines + _lines(graph)[1:]) + "\n"


def bodies(graph: Graph) -> dict[str, Graph]:
    """The bodies of branches and loops by the digest of their text; inner bodies come first."""
    found: dict[str, Graph] = {}
    for op in _readable_order(graph):
        for f in fields(op.attrs):
            value = getattr(op.attrs, f.name)
            if isinstance(value, Body):
                inner: Graph = value.graph  # type: ignore[attr-defined]
                found |= bodies(inner)
                found[value.digest] = inner  # type: ignore[attr-defined]
    return found


def _lines(graph: Graph) -> list[str]:
    """The lines of a graph, without the bodies inside of it."""
    lines = [f"graph {json.dumps(graph.name)}"]
    for name, d in sorted(graph.symbols().items()):
        ((monomial, _),) = d.terms
        s = monomial[0]
        if isinstance(s, Symbol) and (s.lo or s.hi != INF):
            lines.append(f"symbol {_name(name)} {s.lo}..{'' if s.hi == INF else s.hi}")
    names = {v: _name(graph.output(v).name) for op in graph.ops() for v in op.values}
    for op in _readable_order(graph):
        lines.append(_line(op, names))
    return lines


def _readable_order(graph: Graph) -> list[Op]:
    """Inputs, then each op as late as its first user allows, then outputs; independent of ids if no op is dead."""
    done = set(graph.inputs)
    order = [graph.op(i) for i in graph.inputs]
    roots = [*graph.outputs, *(op.id for op in graph.order() if op.kind not in ("Input", "Output"))]
    for root in roots:
        stack = [root]
        while stack:
            op = graph.op(stack[-1])
            waiting = [v.op for v in op.inputs if v is not None and v.op not in done]
            if waiting:
                stack.extend(reversed(waiting))
                continue
            stack.pop()
            if op.id not in done:
                done.add(op.id)
                if op.kind != "Output":
                    order.append(op)
    return order + [graph.op(i) for i in graph.outputs]


def _line(op: Op, names: Mapping[Value, str]) -> str:
    typed = [f"{_name(o.name)}: {o.type}" for o in op.outputs]
    src = f" <- {', '.join(map(_name, sorted(op.src)))}" if op.src else ""
    if op.kind == "Input":
        return f"input {typed[0]}"
    if op.kind == "Output":
        source = op.inputs[0]
        assert source is not None
        own = _name(op.outputs[0].name)
        return f"output {own}" if own == names[source] else f"output {own} = {names[source]}"
    if op.kind == "Constant":
        array = op.attrs.value
        shown = (
            f"[{', '.join(map(_scalar, array.reshape(-1).tolist()))}]"
            if _inline(array)
            else f"sha256:{_digest(op.attrs)}"
        )
        return f"const {typed[0]} = {shown}{src}"
    operands = ", ".join("_" if v is None else names[v] for v in op.inputs)
    return f"{', '.join(typed)} = {op.kind}({operands}){attrs_text(op.attrs)}{src}"


def _name(name: str) -> str:
    return name if re.fullmatch(_WORD, name) and name not in _KEYWORDS else json.dumps(name)


def _inline(array: Array) -> bool:
    return array.size <= INLINE_ELEMENTS and array.dtype.kind != "c"


def _scalar(x: bool | int | float) -> str:
    return str(x).lower() if isinstance(x, bool) else repr(x)


def _digest(attrs: ConstantAttrs) -> str:
    """First 64 bits of the SHA-256 over type, shape and little-endian bytes."""
    if attrs not in _digests:
        array = np.ascontiguousarray(attrs.value)
        digest = hashlib.sha256(f"{dtype_name(array.dtype)}{array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
        _digests[attrs] = digest.hexdigest()[:16]
    return _digests[attrs]


def attrs_text(attrs: Attrs) -> str:
    """Attributes that differ from their default, each as `` name=value``."""
    return "".join(
        f" {f.name}={_plain(getattr(attrs, f.name))}"
        for f in sorted(fields(attrs), key=lambda f: f.name in ("prologue", "epilogue"))
        if not _same(getattr(attrs, f.name), _default(f))
    )


def _default(f: Field[Any]) -> Any:
    return f.default_factory() if f.default_factory is not MISSING else f.default


def _same(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(np.all(a == b))


def _plain(v: Any) -> str:
    """An attribute's value. Stages are written in brackets, other sequences in parentheses."""
    if v is None:
        return "none"
    if isinstance(v, str):
        return json.dumps(v)
    if isinstance(v, np.dtype):
        return dtype_name(v)
    if isinstance(v, complex):
        return f"complex({v.real!r}, {v.imag!r})"
    if isinstance(v, (bool, int, float)):
        return _scalar(v)
    if isinstance(v, np.generic):
        return _scalar(v.item())
    if isinstance(v, tuple) and v and all(isinstance(s, Stage) for s in v):
        return f"[{', '.join(map(_stage, v))}]"
    if isinstance(v, tuple):
        return f"({', '.join(map(_plain, v))}{',' if len(v) == 1 else ''})"
    if isinstance(v, Body):
        return f"@{v.digest}"  # type: ignore[attr-defined]
    raise InternalError(f"an attribute of type {type(v).__name__} has no text form")


def _stage(s: Stage) -> str:
    args = ", ".join("_" if a is None else f"%{~a}" if a < 0 else f"${a}" for a in s.args)
    return f"{s.kind}({args}){attrs_text(s.attrs)}"
