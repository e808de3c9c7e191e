"""The user's own operators, in the form that engines need at run time.

A :class:`CustomOp` is passed to ``optdnn.build`` and to ``optdnn.load``; importing registers nothing. An engine identifies the
operators it uses by name and digest (of their declaration and source), and refuses to load without exactly these.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import textwrap
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from optdnn.errors import EngineError, RunError, UsageError
from optdnn.types import Array, TensorType

Scalar: TypeAlias = tuple[str, float]
"""A field of a kernel's parameters: ("i32" | "u32" | "i64" | "f32", value)."""
PREFIX = "custom:"
_NAME = re.compile(r"[A-Za-z_][\w.]*\.[A-Za-z_]\w*")


@dataclass(frozen=True)
class CudaLaunch:
    """The launch of a kernel: blocks, threads per block, the scalars that follow its pointers, dynamic shared bytes."""

    grid: tuple[int, int, int]
    threads: int
    scalars: tuple[Scalar, ...] = ()
    shared: int = 0


@dataclass(frozen=True)
class CudaKernel:
    """A CUDA kernel of a custom operator, and its launches: a tactic of the cuda target.

    ``source`` is CUDA C++ with the function ``extern "C" __global__ void FUNCTION(const __grid_constant__ Params p)``. It
    declares ``struct Params``: a pointer per operand, then per result, then the scalars of the launch, in C's layout. ``X0``,
    ``X1``, … and ``Y0``, … are the element types. The helpers of general.cuh are available. Tensors are dense, in row-major order.
    ``launch(inputs, outputs, attributes)`` returns the launch for these types. ``refuse``, with the same arguments, may return a
    reason why the kernel does not support them. The operator then runs on the CPU.
    """

    source: str
    function: str
    launch: Callable[[Sequence[TensorType], Sequence[TensorType], Mapping[str, Any]], CudaLaunch]
    refuse: Callable[[Sequence[TensorType], Sequence[TensorType], Mapping[str, Any]], str | None] | None = None


@dataclass(frozen=True, eq=False)
class CustomOp:
    """A custom operator. Make it with :func:`custom_op`."""

    name: str
    infer: Callable[..., Any]
    reference: Callable[..., Any]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    cuda: CudaKernel | None = None
    version: str = "1"
    digest: str = ""

    @property
    def requirement(self) -> str:
        """The operator's name in an engine's requirements."""
        return f"{PREFIX}{self.name}@{self.digest}"


def custom_op(
    name: str,
    *,
    infer: Callable[..., Any],
    reference: Callable[..., Any],
    attributes: Mapping[str, Any] | None = None,
    cuda: CudaKernel | None = None,
    version: str = "1",
) -> CustomOp:
    """Declare the operator that ONNX models call ``DOMAIN.TYPE`` ("com.example.Shrink").

    ``infer(types, attributes)`` returns the :class:`~optdnn.types.TensorType` of the result (or a sequence of types);
    ``reference(*arrays, **attributes)`` computes it in NumPy: an array, or a tuple. ``attributes`` are the names and defaults of
    ONNX attributes (numbers, text, lists of them); others are refused. ``version`` distinguishes two kernels with the same source
    that call different code. Raises UsageError for values that an engine cannot store.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(f"a custom operator is called DOMAIN.TYPE, as in com.example.Shrink, not {name!r}")
    if not callable(infer) or not callable(reference):
        raise UsageError(f"custom operator {name}: infer and reference must be functions")
    defaults = dict(attributes or {})
    for key, value in defaults.items():
        if not plain(value):
            raise UsageError(f"custom operator {name}: attribute {key}={value!r} is not a number, text or list of them")
    parts: list[Any] = [name, version, json.dumps(defaults, sort_keys=True), _source(infer), _source(reference)]
    if cuda is not None:
        parts += [cuda.source, cuda.function, _source(cuda.launch), "" if cuda.refuse is None else _source(cuda.refuse)]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]
    op = CustomOp(name, infer, reference, defaults, cuda, version, digest)
    return _KNOWN.setdefault(digest, op)


def plain(value: Any) -> bool:
    """Whether an attribute can be stored: a number, text, or a list of them."""
    if isinstance(value, (list, tuple)):
        return all(isinstance(v, (bool, int, float, str)) for v in value)
    return isinstance(value, (bool, int, float, str))


def _source(function: Callable[..., Any]) -> str:
    """A function's source text, or its bytecode if there is no source."""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        code = getattr(function, "__code__", None)
        if code is None:
            return f"{type(function).__module__}.{getattr(function, '__qualname__', repr(function))}"
        return f"{code.co_code.hex()} {code.co_consts!r} {code.co_names!r}"


_KNOWN: weakref.WeakValueDictionary[str, CustomOp] = weakref.WeakValueDictionary()
"""Digest -> operator, as long as something references it: a step finds its operator here. Equal digests are equal operators."""


def known(digest: str, name: str) -> CustomOp:
    """The operator with this digest. Raises RunError if it is not registered."""
    found = _KNOWN.get(digest)
    if found is None:
        raise RunError(f"the custom operator {name} (digest {digest}) is not available", hint="give it: custom_ops=[…]")
    return found


def run_custom(*arrays: Array | None, name: str, digest: str, values: Sequence[Sequence[Any]]) -> tuple[Array, ...]:
    """The NumPy kernel of the kind "Custom": the operator's own. Raises RunError if it fails."""
    op, attributes = known(digest, name), {str(k): v for k, v in values}
    try:
        results = op.reference(*arrays, **attributes)
    except Exception as error:  # it is the user's own
        raise RunError(f"reference of the custom operator {name} failed: {type(error).__name__}: {error}") from error
    return tuple(results) if isinstance(results, (tuple, list)) else (results,)


def custom_list(given: Any) -> tuple[CustomOp, ...]:
    """The value of the option ``custom_ops``. Raises UsageError for anything but a list of different custom operators."""
    if isinstance(given, CustomOp) or not isinstance(given, Iterable):
        raise UsageError("custom_ops must be a list of operators from optdnn.custom_op")
    ops = tuple(given)
    check_custom((), ops)
    return ops


def check_custom(requires: Iterable[str], given: Iterable[CustomOp]) -> tuple[CustomOp, ...]:
    """The given operators that an engine needs. Raises EngineError that names every missing one."""
    by_name: dict[str, CustomOp] = {}
    for op in given:
        if not isinstance(op, CustomOp):
            raise UsageError(f"custom_ops holds a {type(op).__name__}, not an operator from optdnn.custom_op")
        if by_name.setdefault(op.name, op).digest != op.digest:
            raise UsageError(f"custom_ops holds two operators called {op.name}")
    found, faults = [], []
    for text in requires:
        if not text.startswith(PREFIX):
            continue
        name, _, digest = text[len(PREFIX) :].partition("@")
        op_given = by_name.get(name)
        if op_given is None:
            faults.append(f"{name} (digest {digest}) is not given")
        elif op_given.digest != digest:
            faults.append(f"{name} is given with digest {op_given.digest}, the engine was built with {digest}")
        else:
            found.append(op_given)
    if faults:
        raise EngineError(
            f"the engine uses custom operators: {'; '.join(faults)}",
            hint="give the ones that it was built with: optdnn.load(path, custom_ops=[…]), or rebuild it",
        )
    return tuple(found)
