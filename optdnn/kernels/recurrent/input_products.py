"""The product of all inputs of a recurrent layer with its constant weights, in the kernels of ordinary products."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from optdnn.errors import InternalError
from optdnn.ir.epilogue import Epilogue
from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView, up
from optdnn.kernels.conv import fp32, hopper_launch, parts
from optdnn.kernels.conv.fp32_kernel import LARGEST
from optdnn.kernels.conv.fused import Convolution, ConvolutionKernel
from optdnn.kernels.conv.maps import POINTWISE, Feed
from optdnn.kernels.gemm.hopper import HopperGemm, padded_rows, rows_of
from optdnn.kernels.pointwise.pointwise import copied
from optdnn.kernels.tactic import Offer
from optdnn.ops.rnn import GATES
from optdnn.runtime.cuda.gpu_facts import no_kernels
from optdnn.types import FP32, Array


def constant_operand(b: Builder, op: Op, index: int) -> Array:
    """A constant operand. Raises InternalError if it is not constant."""
    found = b.graph.constant_value(op.inputs[index])
    if found is None:
        raise InternalError(f"{op.kind} {op.name}: its weights are not constant")
    return found


def refuse(b: Builder, op: Op) -> str | None:
    """Why no kernel of ordinary products takes the layer's inputs, or None. Its weights are constant."""
    steps, count, batch, hidden = op.outputs[0].type.static_shape
    columns, depth = count * GATES[op.kind] * hidden, constant_operand(b, op, 1).shape[2]
    dtype = op.outputs[0].type.dtype
    if depth == 0:
        return "its inputs have no elements"
    if dtype != FP32 and columns % 8:
        return f"rows of {columns} results do not begin at multiples of 16 bytes"
    if not b.gpu.hopper and (dtype != FP32 or no_kernels(b.arch) is not None):
        return f"its product of the inputs needs Hopper's wgmma and TMA (sm_90a), not {b.arch}"
    if steps * batch * up(max(columns, depth), 8) >= LARGEST:
        return "its tensors have more elements than 32-bit offsets can address"
    return None


def emit(b: Builder, op: Op) -> TensorView:
    """Emits the products of all inputs with the weights of all directions, plus the input biases, in the type of the layer:
    ``[steps * batch, directions * gates * hidden]``."""
    steps, count, batch, hidden = op.outputs[0].type.static_shape
    rows, columns, dtype = steps * batch, count * GATES[op.kind] * hidden, op.outputs[0].type.dtype
    weights = constant_operand(b, op, 1).reshape(columns, -1, 1, 1)
    aligned = columns % 8 == 0  # other results are computed on scalar units, which read rows of any pitch
    x = b.operand(op.inputs[0])
    read = rows_of(x, aligned=aligned)
    if read is None or read.shape[0] * read.strides[0] >= LARGEST:  # features of a tensor with many more of them
        read = rows_of(copied(b, op, x, "inputs", padded_rows(x.shape)))
    out = b.new(f"{op.outputs[0].name}.gates", dtype, (rows, columns))
    written = rows_of(out, aligned=aligned)
    assert read is not None
    assert written is not None
    bias = None
    if op.input(3) is not None:
        given = constant_operand(b, op, 3)
        bias = np.ascontiguousarray(given[:, : given.shape[1] // 2]).reshape(-1).astype(np.float32)
    c = Convolution((Feed(read, weights, *POINTWISE),), bias, Epilogue(), None, written, out)
    kernel, offer = min(_offers(b, op, c), key=lambda found: found[1].predicted)
    kernel.launch(b, op, c, kernel.problem_of(b, op, c), offer.config)
    return out


def _offers(b: Builder, op: Op, c: Convolution) -> Iterator[tuple[ConvolutionKernel, Offer]]:
    """The kernels that take the product, with their best configurations."""
    wide = c.out.dtype == FP32
    if b.gpu.hopper:
        kernel = parts.PartsGemm() if wide else HopperGemm()
        yield from ((kernel, offer) for offer in hopper_launch.ranked(kernel.problem_of(b, op, c), b.gpu)[:1])
    if wide:
        scalar = fp32.TiledGemm()
        for offer in scalar.offers(scalar.problem_of(b, op, c), b.gpu)[:1]:
            yield scalar, Offer(offer.config, parts.SLOWER * offer.predicted, offer.row_invariant)
