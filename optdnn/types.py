"""Tensor types and the names of element types.

Element types are NumPy dtypes everywhere; bfloat16, the floats of 8 and fewer bits and the integers of 2 and 4 bits are those of
``ml_dtypes``. In memory, and in engines, an element of less than a byte takes one; ONNX files pack them (:func:`packed`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from optdnn.dim import Dim, DimLike, dim_max, evaluate, substitute
from optdnn.errors import ShapeError

Array: TypeAlias = npt.NDArray[Any]
DType: TypeAlias = np.dtype[Any]
Shape: TypeAlias = tuple[DimLike, ...]

DTYPES: dict[str, DType] = {
    "fp64": np.dtype(np.float64),
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "fp8_e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "fp8_e5m2fnuz": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "fp8_e8m0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "fp6_e2m3": np.dtype(ml_dtypes.float6_e2m3fn),
    "fp6_e3m2": np.dtype(ml_dtypes.float6_e3m2fn),
    "fp4_e2m1": np.dtype(ml_dtypes.float4_e2m1fn),
    "int64": np.dtype(np.int64),
    "int32": np.dtype(np.int32),
    "int16": np.dtype(np.int16),
    "int8": np.dtype(np.int8),
    "uint64": np.dtype(np.uint64),
    "uint32": np.dtype(np.uint32),
    "uint16": np.dtype(np.uint16),
    "uint8": np.dtype(np.uint8),
    "int4": np.dtype(ml_dtypes.int4),
    "uint4": np.dtype(ml_dtypes.uint4),
    "int2": np.dtype(ml_dtypes.int2),
    "uint2": np.dtype(ml_dtypes.uint2),
    "bool": np.dtype(np.bool_),
    "complex64": np.dtype(np.complex64),
    "complex128": np.dtype(np.complex128),
}
"""Short name -> dtype: every element type optdnn stores."""
ONNX_TYPES: dict[int, DType] = {
    1: DTYPES["fp32"],
    2: DTYPES["uint8"],
    3: DTYPES["int8"],
    4: DTYPES["uint16"],
    5: DTYPES["int16"],
    6: DTYPES["int32"],
    7: DTYPES["int64"],
    9: DTYPES["bool"],
    10: DTYPES["fp16"],
    11: DTYPES["fp64"],
    12: DTYPES["uint32"],
    13: DTYPES["uint64"],
    14: DTYPES["complex64"],
    15: DTYPES["complex128"],
    16: DTYPES["bf16"],
    17: DTYPES["fp8_e4m3"],
    18: DTYPES["fp8_e4m3fnuz"],
    19: DTYPES["fp8_e5m2"],
    20: DTYPES["fp8_e5m2fnuz"],
    21: DTYPES["uint4"],
    22: DTYPES["int4"],
    23: DTYPES["fp4_e2m1"],
    24: DTYPES["fp8_e8m0"],
    25: DTYPES["uint2"],
    26: DTYPES["int2"],
    27: DTYPES["fp6_e2m3"],
    28: DTYPES["fp6_e3m2"],
}
"""Number in ``TensorProto.DataType`` -> dtype, of the element types that optdnn stores."""
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
    """The short name of a dtype ("fp32", "bf16", "int64", …). Raises ShapeError for one optdnn has no name for."""
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
    """How many bits an element takes in an ONNX file."""
    return _BITS.get(dtype, 8 * dtype.itemsize)


def packed_bytes(dtype: DType, count: int) -> int:
    """Bytes of ``count`` elements in an ONNX file."""
    return -(-count * bits_of(dtype) // 8)


def packed(array: Array) -> Array:
    """Elements of less than a byte as ONNX packs them: in row-major order, from the lowest bits on. Others: their bytes."""
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


@dataclass(frozen=True, slots=True)
class QuantRef:
    """Where a lowered quantized tensor finds its scale and zero point: constants' names, and the axis (None: per tensor)."""

    scale: str
    zero_point: str | None
    axis: int | None


@dataclass(frozen=True, slots=True)
class TensorType:
    """Element type, shape and physical layout of one tensor.

    ``shape`` is always in logical ONNX order, whatever ``layout`` says ("" is plain row-major order of the logical
    axes; "nhwc" and the like are physical orders assigned by a target's pipeline). A shape of None: unknown rank.
    """

    dtype: DType
    shape: Shape | None
    layout: str = ""
    quant: QuantRef | None = None

    @property
    def rank(self) -> int | None:
        return None if self.shape is None else len(self.shape)

    @property
    def dims(self) -> Shape:
        """The shape; raises ShapeError where even the rank is unknown."""
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

    def bind(self, sizes: Mapping[str, int]) -> TensorType:
        """The type with the symbols in ``sizes`` replaced by their values."""
        return self if self.shape is None else self.with_shape([substitute(d, sizes) for d in self.shape])

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
    equality at run time); two different symbols give their maximum, which is right for every input that is valid.
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


def evaluate_shape(shape: Shape, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A shape with every symbol replaced from ``sizes``."""
    return tuple(evaluate(d, sizes) for d in shape)


def random_array(rng: np.random.Generator, dtype: DType, shape: tuple[int, ...]) -> Array:
    """Made-up values of an input: standard normal floats and complex numbers, booleans, and integers 0 and 1.

    Integers are mostly indices, masks and token ids: 0 and 1 are valid where anything is.
    """
    if is_float(dtype):
        return rng.standard_normal(shape).astype(dtype)
    if dtype.kind == "c":
        return (rng.standard_normal(shape) + 1j * rng.standard_normal(shape)).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)


def to_tf32(x: Array) -> Array:
    """fp32 rounded to nearest (ties to even) with ten bits of mantissa, as tensor cores multiply at tf32; others as they are."""
    if x.dtype != FP32:
        return x
    bits = np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    rounded = (bits + (0xFFF + ((bits >> 13) & 1)).astype(np.uint32)) & np.uint32(0xFFFFE000)
    return np.where(np.isfinite(x), rounded.view(np.float32).reshape(x.shape), x)
