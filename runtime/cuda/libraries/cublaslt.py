"""Matrix products by cuBLASLt, with their epilogues: bias, ReLU, GELU (tanh), and the addition of another matrix.

The library is column-major, and adds a bias along columns. So the transposed product is requested, d^T = b a^T: its columns are
our rows. (cuBLASLt documentation, "cublasLtMatmul"; the numbers below are its header's enumerations.)
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from functools import partial
from typing import Any

from optdnn.errors import RunError
from optdnn.runtime.cuda.libraries.calls import DTYPES, Called, MatMul
from optdnn.runtime.cuda.libraries.find import shared_object

WORKSPACE = 32 << 20
"""Bytes of scratch memory that an algorithm may use; the library's documentation recommends this size for Hopper."""
RANKED = 8
"""The number of algorithms that the library is asked to rank."""

_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}
_COMPUTE_32F, _R_32F = 68, 0
_TRANSA, _TRANSB, _EPILOGUE, _BIAS_POINTER = 3, 4, 7, 8
_BATCH_COUNT, _BATCH_OFFSET = 5, 6
_MAX_WORKSPACE = 1
_EPILOGUES = {(False, ""): 1, (False, "relu"): 2, (True, ""): 4, (True, "relu"): 6, (False, "gelu_tanh"): 32,
              (True, "gelu_tanh"): 36}  # fmt: skip


class _Ranked(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


def _check(status: int, what: str) -> None:
    if status:
        raise RunError(f"cuBLASLt: {what} failed with status {status}")


class Handle:
    """A handle of the library; used by one thread at a time."""

    def __init__(self) -> None:
        self.library = shared_object("cublaslt")
        self._handle = c_void_p()
        _check(self.library.cublasLtCreate(byref(self._handle)), "cublasLtCreate")

    def prepare(self, operation: MatMul) -> PreparedMatMul:
        """Raises RunError if the library has no algorithm for it."""
        return PreparedMatMul(self, operation)


class PreparedMatMul:
    """A product with a chosen algorithm. ``workspace``: bytes of scratch memory; ``ranked``: the number of algorithms."""

    def __init__(self, handle: Handle, operation: MatMul):
        o, self._handle = operation, handle
        self.library, self.operation = handle.library, operation
        self._layouts = {
            # Column-major: b is k x n (read transposed) or n x k, a is k x m, c and d are n x m.
            "b": self._layout(*((o.k, o.n) if o.transposed else (o.n, o.k)), o.ldb, o.strides[1]),
            "a": self._layout(o.k, o.m, o.lda, o.strides[0]),
            "d": self._layout(o.n, o.m, o.ldd, o.strides[3]),
        }
        self._layouts["c"] = self._layout(o.n, o.m, o.ldc, o.strides[2]) if o.ldc else self._layouts["d"]
        self._bias = c_void_p(16)  # a placeholder: the presence of a bias affects the choice of algorithms
        self._descriptor = self._described()
        ranked = self._rank()
        self.ranked = len(ranked)
        if not ranked:
            raise RunError(f"cuBLASLt has no algorithm for {operation}")
        if operation.algorithm >= len(ranked):
            raise RunError(
                f"cuBLASLt ranks {len(ranked)} algorithms for a product; the engine asks for number {operation.algorithm}",
                hint="the library is another version than the engine was tuned with: tune it again",
            )
        self._chosen = ranked[operation.algorithm]
        self.workspace = int(self._chosen.workspace)

    def _layout(self, rows: int, columns: int, pitch: int, stride: int) -> c_void_p:
        layout = c_void_p()
        create = self.library.cublasLtMatrixLayoutCreate
        args = (byref(layout), c_int(_TYPES[self.operation.dtype]), c_uint64(rows), c_uint64(columns), c_int64(pitch))
        _check(create(*args), "cublasLtMatrixLayoutCreate")
        if self.operation.batch > 1:
            for key, value in ((_BATCH_COUNT, c_int32(self.operation.batch)), (_BATCH_OFFSET, c_int64(stride))):
                set_ = self.library.cublasLtMatrixLayoutSetAttribute
                _check(set_(layout, c_int(key), byref(value), c_size_t(ctypes.sizeof(value))), "a layout's attribute")
        return layout

    def _described(self) -> c_void_p:
        o, descriptor = self.operation, c_void_p()
        create = self.library.cublasLtMatmulDescCreate
        _check(create(byref(descriptor), c_int(_COMPUTE_32F), c_int(_R_32F)), "cublasLtMatmulDescCreate")
        self._set(descriptor, _TRANSA, c_int32(1 if o.transposed else 0))
        self._set(descriptor, _TRANSB, c_int32(0))
        self._set(descriptor, _EPILOGUE, c_uint32(_EPILOGUES[o.bias, o.activation]))
        if o.bias:
            self._set(descriptor, _BIAS_POINTER, self._bias)
        return descriptor

    def _set(self, descriptor: c_void_p, key: int, value: Any) -> None:
        call = self.library.cublasLtMatmulDescSetAttribute
        _check(call(descriptor, c_int(key), byref(value), c_size_t(ctypes.sizeof(value))), "a product's attribute")

    def _rank(self) -> list[_Ranked]:
        library, preference = self.library, c_void_p()
        _check(library.cublasLtMatmulPreferenceCreate(byref(preference)), "cublasLtMatmulPreferenceCreate")
        try:
            most = c_uint64(WORKSPACE)
            set_ = library.cublasLtMatmulPreferenceSetAttribute
            _check(set_(preference, c_int(_MAX_WORKSPACE), byref(most), c_size_t(8)), "a preference's attribute")
            results, count = (_Ranked * RANKED)(), c_int()
            status = library.cublasLtMatmulAlgoGetHeuristic(
                self._handle._handle, self._descriptor, *(self._layouts[x] for x in "bacd"), preference,
                c_int(RANKED), results, byref(count),
            )  # fmt: skip
            return [] if status else [r for r in results[: count.value] if r.state == 0]
        finally:
            library.cublasLtMatmulPreferenceDestroy(preference)

    def bind(self, addresses: Mapping[str, int], workspace: int) -> Called:
        """The call on these addresses (of ``a``, ``b``, ``d``, and, if present, ``c`` and ``bias``)."""
        return Called(partial(self._enqueue, dict(addresses), workspace))

    def _enqueue(self, at: Mapping[str, int], workspace: int, stream: int) -> None:
        o, layouts = self.operation, self._layouts
        if o.bias:
            self._set(self._descriptor, _BIAS_POINTER, c_void_p(at["bias"]))
        operands = [
            c_void_p(at["b"]), layouts["b"], c_void_p(at["a"]), layouts["a"], byref(c_float(1.0 if o.ldc else 0.0)),
            c_void_p(at.get("c", at["d"])), layouts["c"], c_void_p(at["d"]), layouts["d"],
        ]  # fmt: skip
        status = self.library.cublasLtMatmul(
            self._handle._handle, self._descriptor, byref(c_float(o.alpha)), *operands, byref(self._chosen.algorithm),
            c_void_p(workspace), c_size_t(self.workspace), c_void_p(stream),
        )  # fmt: skip
        _check(status, f"cublasLtMatmul of {o}")


assert set(_TYPES) == set(DTYPES)
