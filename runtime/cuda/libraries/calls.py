"""Calls of vendors' libraries as plain data: the operation that cuBLASLt or cuDNN computes, and its operands.

Each operation knows which bytes of its operands it reads and writes (``extents``), so that a call is checked against its buffers
before a library gets addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

from optdnn.errors import EngineError
from optdnn.runtime.program import Plain

DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4}
"""Element types of calls, and their sizes in bytes."""
ACTIVATIONS = ("relu", "gelu_tanh")
"""Functions that cuBLASLt can apply to a product's result (GELU in its tanh form)."""
POINTWISE = ("bias", "add", "relu", "sigmoid", "tanh", "swish", "gelu", "gelu_tanh")
"""Stages that cuDNN's graphs can apply to a convolution's result, in sequence; "bias" and "add" read a further operand."""


View = tuple[Sequence[int], Sequence[int]]
"""Shape and strides of an operand, in elements."""


class _Operands:
    """The operands of an operation."""

    dtype: str

    def views(self) -> dict[str, View]:
        raise NotImplementedError

    def item(self, operand: str) -> int:
        return DTYPES[self.dtype]

    @property
    def extents(self) -> dict[str, int]:
        """The bytes of each operand, from its first element to its last."""
        return {
            name: (1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))) * self.item(name)
            for name, (shape, strides) in self.views().items()
        }


@dataclass(frozen=True)
class MatMul(_Operands):
    """``d[m, n] = activation(alpha * a[m, k] @ b[n, k]^T + bias[n]) `` (+ ``c`` before the bias), for each of ``batch`` matrices.

    Rows are ``lda``, ``ldb``, ``ldc``, ``ldd`` elements apart, matrices ``strides`` (of a, b, c, d). k and n are contiguous (k of
    ``b`` only if ``transposed``; otherwise ``b`` is [k, n] with n contiguous). ``algorithm``: its rank in the library's own
    ranking.
    """

    library: ClassVar[str] = "cublaslt"

    dtype: str
    m: int
    n: int
    k: int
    lda: int
    ldb: int
    ldd: int
    transposed: bool = True
    batch: int = 1
    strides: tuple[int, ...] = (0, 0, 0, 0)
    alpha: float = 1.0
    bias: bool = False
    ldc: int = 0
    activation: str = ""
    algorithm: int = 0

    def check(self) -> None:
        """Raise ValueError for numbers that are invalid in a call."""
        sizes = (self.m, self.n, self.k, self.batch)
        _need(min(sizes) >= 1 and max(sizes) < 1 << 31, "has an empty or enormous product")
        _need(self.dtype in DTYPES and self.activation in ("", *ACTIVATIONS), "has an unknown type or activation")
        wide = self.k if self.transposed else self.n
        _need(self.lda >= self.k and self.ldb >= wide and self.ldd >= self.n, "has rows that overlap")
        _need(self.ldc == 0 or self.ldc >= self.n, "has rows that overlap")
        _need(len(self.strides) == 4 and min(self.strides) >= 0 and self.algorithm >= 0, "has malformed strides")

    def views(self) -> dict[str, View]:
        rows = (self.n, self.k) if self.transposed else (self.k, self.n)
        sides = {
            "a": ((self.m, self.k), self.lda, self.strides[0]),
            "b": (rows, self.ldb, self.strides[1]),
            "d": ((self.m, self.n), self.ldd, self.strides[3]),
            **({"c": ((self.m, self.n), self.ldc, self.strides[2])} if self.ldc else {}),
        }
        views: dict[str, View] = {
            name: ((self.batch, *shape), (stride, pitch, 1)) for name, (shape, pitch, stride) in sides.items()
        }
        return views | ({"bias": ((self.n,), (1,))} if self.bias else {})


@dataclass(frozen=True)
class Convolution(_Operands):
    """A convolution over two spatial axes with pointwise ``stages`` (of :data:`POINTWISE`) after it.

    ``x`` [n, c, h, w], ``w`` [k, c / groups, r, s], ``y`` [n, k, p, q]: shapes in that order and strides in elements;
    ``pads`` are (top, left, bottom, right). "bias" reads ``bias`` [k] of the same type, "add" reads ``z``, a tensor like ``y``.
    ``plan``: its rank in the library's own ranking.
    """

    library: ClassVar[str] = "cudnn"

    dtype: str
    x_shape: tuple[int, ...]
    x_strides: tuple[int, ...]
    w_shape: tuple[int, ...]
    w_strides: tuple[int, ...]
    y_shape: tuple[int, ...]
    y_strides: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    stages: tuple[str, ...] = ()
    z_strides: tuple[int, ...] = ()
    plan: int = 0

    def check(self) -> None:
        """Raise ValueError for numbers that are invalid in a call."""
        shapes = (self.x_shape, self.w_shape, self.y_shape, self.x_strides, self.w_strides, self.y_strides)
        _need(all(len(s) == 4 and min(s) >= 1 and max(s) < 1 << 40 for s in shapes), "has malformed shapes")
        pairs = (self.strides, self.dilations)
        _need(all(len(p) == 2 and min(p) >= 1 for p in pairs), "has malformed strides or dilations")
        _need(len(self.pads) == 4 and min(self.pads) >= 0 and self.plan >= 0, "has malformed padding")
        _need(self.dtype in DTYPES and set(self.stages) <= set(POINTWISE), "has an unknown type or stage")
        _need(len(set(self.stages)) == len(self.stages), "has a stage twice")
        added = "add" in self.stages
        _need(len(self.z_strides) == 4 * added and min(self.z_strides, default=1) >= 1, "has malformed strides")
        n, c, h, w = self.x_shape
        k, lanes, r, s = self.w_shape
        top, left, bottom, right = self.pads
        p = (h + top + bottom - (r - 1) * self.dilations[0] - 1) // self.strides[0] + 1
        q = (w + left + right - (s - 1) * self.dilations[1] - 1) // self.strides[1] + 1
        _need(self.y_shape == (n, k, p, q) and c % lanes == 0 and k % (c // lanes) == 0, "has shapes that do not fit")

    def views(self) -> dict[str, View]:
        return {
            "x": (self.x_shape, self.x_strides),
            "w": (self.w_shape, self.w_strides),
            "y": (self.y_shape, self.y_strides),
            **({"bias": (self.w_shape[:1], (1,))} if "bias" in self.stages else {}),
            **({"z": (self.y_shape, self.z_strides)} if "add" in self.stages else {}),
        }


@dataclass(frozen=True)
class Attention(_Operands):
    """``out = softmax(scale * q k^T + mask) v``: q and out [batch, heads, rows, size], k and v [batch, groups, columns, size].

    Strides are in elements, the last of them is 1. ``mask`` (if ``mask_shape`` is not empty) is added, has the same type, and
    broadcasts. ``causal``: row i sees columns up to i.
    """

    library: ClassVar[str] = "cudnn"

    dtype: str
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    q_strides: tuple[int, ...]
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    out_strides: tuple[int, ...]
    scale: float
    causal: bool = False
    mask_shape: tuple[int, ...] = ()
    mask_strides: tuple[int, ...] = ()

    def check(self) -> None:
        """Raise ValueError for numbers that are invalid in a call."""
        lists = (self.q_shape, self.k_shape, self.q_strides, self.k_strides, self.v_strides, self.out_strides)
        _need(all(len(x) == 4 and min(x) >= 1 for x in lists), "has malformed shapes")
        _need(self.dtype in ("float16", "bfloat16"), "has a type that attention does not take")
        b, h, _, size = self.q_shape
        _need(
            self.k_shape[0] == b and h % self.k_shape[1] == 0 and self.k_shape[3] == size, "has shapes that do not fit"
        )
        _need(len(self.mask_shape) in (0, 4) and len(self.mask_strides) == len(self.mask_shape), "has a malformed mask")
        _need(min((*self.mask_strides, 0)) >= 0, "has a malformed mask")
        scores = (b, h, self.q_shape[2], self.k_shape[2])
        _need(all(n in (1, s) for n, s in zip(self.mask_shape, scores, strict=False)), "has a mask that does not fit")

    def views(self) -> dict[str, View]:
        return {
            "q": (self.q_shape, self.q_strides),
            "k": (self.k_shape, self.k_strides),
            "v": (self.k_shape, self.v_strides),
            "out": (self.q_shape, self.out_strides),
            **({"mask": (self.mask_shape, self.mask_strides)} if self.mask_shape else {}),
        }


@dataclass(frozen=True)
class Norm(_Operands):
    """``y = (x - mean) / sqrt(variance + epsilon) * scale + bias`` along each of ``rows`` dense rows of ``size`` elements; ``kind``
    "rms" has neither mean nor bias. ``scale`` and ``bias`` are fp32 [size]."""

    library: ClassVar[str] = "cudnn"

    dtype: str
    kind: str
    rows: int
    size: int
    epsilon: float

    def check(self) -> None:
        """Raise ValueError for numbers that are invalid in a call."""
        _need(self.dtype in DTYPES and self.kind in ("layer", "rms"), "has an unknown type or kind")
        _need(1 <= self.rows < 1 << 31 and 1 <= self.size < 1 << 31 and self.epsilon >= 0, "has malformed sizes")

    def views(self) -> dict[str, View]:
        whole: View = ((self.rows, self.size), (self.size, 1))
        row: View = ((self.size,), (1,))
        return {"x": whole, "scale": row, "y": whole, **({"bias": row} if self.kind == "layer" else {})}

    def item(self, operand: str) -> int:
        return 4 if operand in ("scale", "bias") else super().item(operand)


@dataclass(frozen=True)
class Collective(_Operands):
    """A collective of ``world`` ranks on ``count`` contiguous elements: ``reduce`` writes their sum over the ranks into
    ``y``, ``gather`` the elements of all ranks in sequence."""

    library: ClassVar[str] = "nccl"

    dtype: str
    kind: str
    count: int
    world: int

    def check(self) -> None:
        """Raise ValueError for numbers that are invalid in a call."""
        _need(self.dtype in DTYPES and self.kind in ("reduce", "gather"), "has an unknown type or kind")
        _need(1 <= self.count < 1 << 40 and 2 <= self.world <= 64, "has an impossible size")

    def views(self) -> dict[str, View]:
        made = self.count * (self.world if self.kind == "gather" else 1)
        return {"x": ((self.count,), (1,)), "y": ((made,), (1,))}


RESULTS = ("d", "y", "out")
"""The operands that operations write; they read the others."""

Operation = MatMul | Convolution | Attention | Norm | Collective
KINDS: dict[str, type[Operation]] = {
    "matmul": MatMul,
    "convolution": Convolution,
    "attention": Attention,
    "norm": Norm,
    "collective": Collective,
}


def to_plain(operation: Operation) -> dict[str, Plain]:
    """Plain data for an engine."""
    name = next(n for n, kind in KINDS.items() if type(operation) is kind)
    numbers = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(operation).items()}
    return {"name": name, **numbers}


def from_plain(plain: Any) -> Operation:
    """The inverse of :func:`to_plain`, with every number checked. Raises EngineError."""
    try:
        given = dict(plain)
        kind = KINDS[given.pop("name")]
        known = {f.name: str(f.type) for f in fields(kind)}
        _need(set(given) == set(known), "has unexpected or missing parts")
        operation = kind(**{k: _value(v, known[k]) for k, v in given.items()})
        operation.check()
    except (KeyError, TypeError, ValueError) as error:
        raise EngineError(f"a call of a library is malformed: {type(error).__name__}: {error}") from error
    return operation


def _value(value: Any, wanted: str) -> Any:
    if wanted.startswith("tuple"):
        _need(isinstance(value, (list, tuple)), "lacks a list where one is required")
        inner = str if "str" in wanted else int
        _need(all(type(x) is inner for x in value), "has a list with entries of another type")
        return tuple(value)
    if wanted == "float":
        _need(type(value) in (int, float), "lacks a number where one is required")
        return float(value)
    _need(type(value).__name__ == wanted, f"has {value!r} for a {wanted}")
    return value


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(f"it {message}")


@dataclass(frozen=True)
class Called:
    """One call on fixed addresses, which can be enqueued or captured any number of times, like a launch."""

    enqueue: Callable[[int], None]
    """Enqueues it on the stream with this handle. Raises RunError."""


@dataclass(frozen=True)
class LibraryCall:
    """One call: an operation, and for each of its operands (by name) the step's operand number and an offset in bytes."""

    operation: Operation
    operands: Mapping[str, tuple[int, int]]

    def to_plain(self) -> Plain:
        places = {name: list(place) for name, place in self.operands.items()}
        return {"operation": to_plain(self.operation), "operands": places}


def parse_call(plain: Any, sizes: Sequence[int]) -> LibraryCall:
    """A call, checked against the sizes in bytes of the step's operands. Raises EngineError."""
    try:
        operation = from_plain(plain["operation"])
        places = {str(k): (int(v[0]), int(v[1])) for k, v in dict(plain["operands"]).items()}
        extents = operation.extents
        _need(
            set(plain) == {"operation", "operands"} and set(places) == set(extents),
            "names unexpected or missing operands",
        )
        for name, (operand, offset) in places.items():
            _need(0 <= operand < len(sizes) and offset >= 0, f"has no operand {name}")
            _need(offset + extents[name] <= sizes[operand], f"reaches beyond the buffer of {name}")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise EngineError(f"a call of a library is malformed: {type(error).__name__}: {error}") from error
    return LibraryCall(operation, places)
