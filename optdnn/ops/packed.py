"""Products with packed weights, and rows of packed tables. Their storage format: :mod:`optdnn.ops.packed_layout`.

* ``PackedMatMul(x [..., K], weights, scales, zeros?) -> [..., N]`` of the type of ``x``: ``x`` times the weights transposed.
  A bias is an added stage of the epilogue.
* ``PackedGather(weights, indices, scales, zeros?) -> [*indices, K]`` of the type ``output_dtype``.
"""

from __future__ import annotations

from optdnn.dim import DimLike
from optdnn.errors import ShapeError
from optdnn.ops.base import PRODUCT_TOL, Call, Result
from optdnn.ops.checks import agree, agree_all, require_rank
from optdnn.ops.definition import OpDef
from optdnn.ops.fused import with_stages
from optdnn.ops.gemm import cost_matmul
from optdnn.ops.indices import refuse_outside
from optdnn.ops.packed_export import export_packed_gather, export_packed_matmul
from optdnn.ops.packed_layout import CODES, PackedGatherAttrs, PackedMatMulAttrs, blocks_of, check_block, row_bytes
from optdnn.ops.values import require_ints
from optdnn.types import DTYPES, UINT8, TensorType, bits_of, is_float


def _check_weights(call: Call, slot: int, block_rows: int) -> DimLike:
    """The packed weights in ``slot`` and their scales (and zero points) fit the attributes. Returns N."""
    a = call.attrs
    if a.code not in CODES:
        raise ShapeError(f"{call.kind} of numbers of type {a.code!r}, not {', '.join(CODES)}")
    if a.K < 1 or block_rows < 1:
        raise ShapeError(f"{call.kind} has K={a.K} and block_rows={block_rows}; both must be positive")
    check_block(a.block_size, a.K, call.kind)
    w, s = call.type(slot), call.type(2)
    require_rank(w, 2, f"{call.kind} weights")
    if w.dtype != UINT8:
        raise ShapeError(f"{call.kind} weights are {w}; packed weights are uint8")
    wanted = row_bytes(a.code, a.K, a.block_size)
    what = f"{call.kind} weights {w}: {a.K} numbers of {bits_of(DTYPES[a.code])} bits in blocks of {a.block_size} take other rows"
    agree(w.dims[1], wanted, what)
    require_rank(s, 2, f"{call.kind} scales")
    if not is_float(s.dtype) or s.dtype.itemsize == 1:
        raise ShapeError(f"{call.kind} scales are {s}; they must be floating-point")
    rows = w.dims[0] if block_rows == 1 else -(-w.static_shape[0] // block_rows)
    agree(s.dims[0], rows, f"{call.kind} scales {s} do not fit weights {w}")
    agree(
        s.dims[1], blocks_of(a.K, a.block_size), f"{call.kind} scales {s} do not fit blocks of {a.block_size} of {a.K}"
    )
    _check_zeros(call, s)
    return w.dims[0]


def _check_zeros(call: Call, scales: TensorType) -> None:
    if not call.has(3):
        return
    z = call.type(3)
    if is_float(DTYPES[call.attrs.code]):
        raise ShapeError(f"{call.kind} of {call.attrs.code} numbers has zero points; floats have none")
    if z.dtype not in (UINT8, scales.dtype):
        raise ShapeError(f"{call.kind} zero points are {z}; they must be uint8 or of the type of the scales {scales}")
    require_rank(z, 2, f"{call.kind} zero points")
    agree_all(z.dims, scales.dims, f"{call.kind} zero points {z} do not have the shape of the scales {scales}")


def _infer_matmul(call: Call) -> Result:
    x = call.type(0)
    rows = _check_weights(call, 1, call.attrs.block_rows)
    if not is_float(x.dtype):
        raise ShapeError(f"{call.kind} of {x}; it must be floating-point")
    if not x.dims:
        raise ShapeError(f"{call.kind} of a scalar")
    agree(x.dims[-1], call.attrs.K, f"{call.kind} of {x}: its rows are not K={call.attrs.K} wide")
    return Result((x.with_shape((*x.dims[:-1], rows)),))


def _infer_gather(call: Call) -> Result:
    require_ints(call, 1)
    _check_weights(call, 0, 1)
    refuse_outside(call)
    indices = call.type(1)
    a: PackedGatherAttrs = call.attrs
    return Result((TensorType(a.output_dtype, None if indices.shape is None else (*indices.shape, a.K)),))


# A sum of K products in fp32 is off by about sqrt(K) roundoffs of its largest partial sum; K reaches some 10^4.

DEFS: tuple[OpDef, ...] = (
    OpDef(
        "PackedMatMul",
        with_stages(_infer_matmul),
        PackedMatMulAttrs,
        {},
        export_packed_matmul,
        cost=cost_matmul,  # without dequantization; bytes are the packed weights'
        tol=PRODUCT_TOL,
        arity=4,
    ),
    OpDef("PackedGather", _infer_gather, PackedGatherAttrs, {}, export_packed_gather),
)
