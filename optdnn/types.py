"""Tensor types and the names of element types.

Element types are NumPy dtypes everywhere; bfloat16, the floats of 8 and fewer bits and the integers of 2 and 4 bits come from
``ml_dtypes``. In memory, and in engines, an element of less than a byte takes one byte; ONNX files pack them (:func:`packed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from optdnn.dim import Dim, DimLike, dim_max
from optdnn.errors import ShapeError

Array: TypeAlias = npt.NDArray[Any]
DType: TypeAlias = np.dtype[Any]
Shape: TypeAlias = tuple[DimLike, ...]

_TYPES: tuple[tuple[str, npt.DTypeLike, int], ...] = (
    ("fp64", np.float64, 11),
    ("fp32", np.float32, 1),
    ("fp16", np.float16, 10),
    ("bf16", ml_dtypes.bfloat16, 16),
    ("fp8_e4m3", ml_dtypes.float8_e4m3fn, 17),
    ("fp8_e5m2", ml_dtypes.float8_e5m2, 19),
    ("fp8_e4m3fnuz", ml_dtypes.float8_e4m3fnuz, 18),
    ("fp8_e5m2fnuz", ml_dtypes.float8_e5m2fnuz, 20),
    ("fp8_e8m0", ml_dtypes.float8_e8m0fnu, 24),
    ("fp6_e2m3", ml_dtypes.float6_e2m3fn, 27),
    ("fp6_e3m2", ml_dtypes.float6_e3m2fn, 28),
    ("fp4_e2m1", ml_dtypes.float4_e2m1fn, 23),
    ("int64", np.int64, 7),
    ("int32", np.int32, 6),
    ("int16", np.int16, 5),
    ("int8", np.int8, 3),
    ("uint64", np.uint64, 13),
    ("uint32", np.uint32, 12),
    ("uint16", np.uint16, 4),
    ("uint8", np.uint8, 2),
    ("int4", ml_dtypes.int4, 22),
    ("uint4", ml_dtypes.uint4, 21),
    ("int2", ml_dtypes.int2, 26),
    ("uint2", ml_dtypes.uint2, 25),
    ("bool", np.bool_, 9),
    ("complex64", np.complex64, 14),
    ("complex128", np.complex128, 15),
)
"""Every element type that optdnn stores: short name, NumPy type, number in ``TensorProto.DataType``."""
DTYPES: dict[str, DType] = {name: np.dtype(dtype) for name, dtype, _ in _TYPES}
"""Short name -> dtype."""
ONNX_TYPES: dict[int, DType] = {number: np.dtype(dtype) for _, dtype, number in _TYPES}
"""Number in ``TensorProto.DataType`` -> dtype."""
_NAMES = {d: n for n, d in DTYPES.items()}
NARROW_FLOATS = tuple(d for n, d in DTYPES.items() if n.startswith(("fp8_", "fp6_", "fp4_")))
"""Floats of 8 and fewer bits; fp32 holds all of them exactly."""
NARROW_INTEGERS = tuple(DTYPES[n] for n in ("int4", "uint4", "int2", "uint2"))
"""Integers of 4 and 2 bits."""
_FLOATS = frozenset({*(DTYPES[n] for n in ("fp64", "fp32", "fp16", "bf16")), *NARROW_FLOATS})
_BITS = {DTYPES[n]: int(n[-1]) for n in ("int4", "uint4", "int2", "uint2")} | {
    DTYPES["fp6_e2m3"]: 6, DTYPES["fp6_e3m2"]: 6, DTYPES["fp4_e2m1"]: 4}  # fmt: skip

FP64, FP32, FP16, BF16 = (DTYPES[n] for n in ("fp64", "fp32", "fp16", "bf16"))
INT64, INT32, INT8, UINT8, BOOL = (DTYPES[n] for n in ("int64", "int32", "int8", "uint8", "bool"))


def dtype_name(dtype: npt.DTypeLike) -> str:
    """The short name of a dtype ("fp32", "bf16", "int64", …). Raises ShapeError for a dtype without one."""
    try:
        return _NAMES[np.dtype(dtype)]
    except (KeyError, TypeError):
        raise ShapeError(f"element type {dtype} is not supported") from None


def is_float(dtype: npt.DTypeLike) -> bool:
    """True for the real floating-point types, bfloat16 and the floats of 8 and fewer bits included."""
    return np.dtype(dtype) in _FLOATS


def is_int(dtype: npt.DTypeLike) -> bool:
    """True for the signed and unsigned integers (not bool), those of 2 and 4 bits included."""
    return np.dtype(dtype) in NARROW_INTEGERS or (np.dtype(dtype).kind in "iu" and not is_float(dtype))


def bits_of(dtype: DType) -> int:
    """The number of bits of an element in an ONNX file."""
    return _BITS.get(dtype, 8 * dtype.itemsize)


def packed_bytes(dtype: DType, count: int) -> int:
    """Bytes of ``count`` elements in an ONNX file."""
    return -(-count * bits_of(dtype) // 8)


def packed(array: Array) -> Array:
    """Elements of less than a byte, packed as in ONNX: in row-major order, from the lowest bits on. Other types: their bytes."""
    flat = np.ascontiguousarray(array).reshape(-1)
    bits = _BITS.get(array.dtype)
    if bits is None:
        return flat.view(np.uint8)
    codes = flat.view(np.uint8)[:, None]
    return np.packbits(np.unpackbits(codes, axis=1, bitorder="little")[:, :bits], bitorder="little")


def unpacked(data: Array, dtype: DType, count: int) -> Array:
    """The inverse of :func:`packed`, for types of less than a byte: uint8 [bytes] -> [count]."""
    bits = _BITS[dtype]
    if bits == 6:
        rows = np.unpackbits(data, count=6 * count, bitorder="little").reshape(count, 6)
        codes = np.packbits(rows, axis=1, bitorder="little").reshape(count)
    else:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = ((data[:, None] >> shifts) & np.uint8((1 << bits) - 1)).reshape(-1)[:count]
    return codes.view(dtype)


RANK_LIMIT = 64
"""The most dimensions of a tensor (NumPy's own limit)."""


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type, shape and physical layout of one tensor.

    ``shape`` is always in logical ONNX order, for any ``layout`` ("" is plain row-major order of the logical
    axes; "nhwc" and the like are physical orders assigned by a target's pipeline). A shape of None: unknown rank.
    """

    dtype: DType
    shape: Shape | None
    layout: str = ""

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    @property
    def dims(self) -> Shape:
        """The shape; raises ShapeError if even the rank is unknown."""
        if self.shape is None:
            raise ShapeError("the rank of a tensor is unknown here")
        return self.shape

    @property
    def is_static(self) -> bool:
        return self.shape is not None and all(isinstance(d, int) for d in self.shape)

    @property
    def static_shape(self) -> tuple[int, ...]:
        """The shape as plain integers; raises ShapeError when a dimension is symbolic."""
        dims = self.dims
        if not all(isinstance(d, int) for d in dims):
            raise ShapeError(f"shape {show_shape(dims)} is not fully known; give it with --shape NAME=…")
        return tuple(d for d in dims if isinstance(d, int))

    @property
    def size(self) -> DimLike:
        """Number of elements."""
        return product(self.dims)

    def with_shape(self, shape: Sequence[DimLike] | None) -> TensorType:
        return replace(self, shape=None if shape is None else tuple(shape))

    def with_dtype(self, dtype: npt.DTypeLike) -> TensorType:
        return replace(self, dtype=np.dtype(dtype))

    def agrees(self, other: TensorType) -> bool:
        """Whether the dtypes are equal and the shapes do not contradict each other: unknown and symbolic sizes agree with any."""
        if self.dtype != other.dtype:
            return False
        if self.shape is None or other.shape is None:
            return True
        return len(self.shape) == len(other.shape) and all(
            a == b or isinstance(a, Dim) or isinstance(b, Dim) for a, b in zip(self.shape, other.shape, strict=True)
        )

    def __str__(self) -> str:
        text = f"{dtype_name(self.dtype)}{show_shape(self.shape)}"
        return f"{text}@{self.layout}" if self.layout else text


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output of an engine: its ONNX name, dtype, and shape with symbolic dimensions as text."""

    name: str
    dtype: DType
    shape: tuple[int | str, ...]

    def __str__(self) -> str:
        return f"{self.name}: {dtype_name(self.dtype)}[{', '.join(map(str, self.shape))}]"


def tensor(dtype: npt.DTypeLike, *shape: DimLike) -> TensorType:
    """Shorthand: ``tensor(np.float32, 1, 3, 224, 224)``."""
    return TensorType(np.dtype(dtype), tuple(shape))


def show_shape(shape: Sequence[DimLike] | None) -> str:
    return "[?]" if shape is None else f"[{', '.join(map(str, shape))}]"


def product(dims: Sequence[DimLike]) -> DimLike:
    """Product of dimensions (1 for none)."""
    total: DimLike = 1
    for d in dims:
        total = total * d
    return total


def normalize_axis(axis: int, rank: int, what: str = "axis") -> int:
    """``axis`` counted from the front; raises ShapeError when it is out of ``-rank .. rank-1``."""
    if not -rank <= axis < max(rank, 1):
        raise ShapeError(f"{what} {axis} is out of range for a tensor of rank {rank}")
    return axis % rank if rank else 0


def broadcast_dims(*shapes: Shape) -> Shape:
    """NumPy broadcasting over ``int | Dim``.

    A symbolic dimension against 1 gives the symbol; against another integer it gives that integer (ONNX requires
    equality at run time); two different symbols give their maximum, which is correct for every valid input.
    Raises ShapeError for two different integers.
    """
    rank = max((len(s) for s in shapes), default=0)
    out: list[DimLike] = []
    for i in range(rank):
        result: DimLike = 1
        for s in shapes:
            k = i - (rank - len(s))
            if k < 0 or s[k] == 1 or s[k] == result:
                continue
            d = s[k]
            if result == 1 or (isinstance(result, Dim) and isinstance(d, int)):
                result = d
            elif isinstance(d, Dim):
                result = result if isinstance(result, int) else dim_max(result, d)
            else:
                raise ShapeError(f"shapes {' and '.join(show_shape(x) for x in shapes)} do not broadcast")
        out.append(result)
    return tuple(out)


def random_array(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...]) -> Array:
    """Made-up values of an input: standard normal floats and complex numbers, booleans, integers 0 and 1, and pictures.

    Integers are mostly indices, masks and token ids: 0 and 1 are valid if anything is. Unsigned integers with four dimensions are a
    batch of pictures, with values of the full range.
    """
    if is_float(dtype):
        return rng.standard_normal(shape).astype(dtype)
    if dtype.kind == "c":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    if dtype.kind == "u" and len(shape) == 4:
        return rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    return rng.integers(0, 2, shape).astype(dtype)


def raw_bytes(array: Array) -> memoryview:
    """The bytes of an array's elements in row-major order; copied only if the array is not contiguous."""
    return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def to_tf32(x: Array) -> Array:
    """fp32 rounded to nearest (ties to even) with a 10-bit mantissa, as tensor cores multiply at tf32; other types unchanged."""
    if x.dtype != FP32:
        return x
    bits = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    rounded = (bits + (0xFFF + ((bits >> 13) & 1)).astype(np.uint32)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded.view(np.float32).reshape(x.shape), x)
