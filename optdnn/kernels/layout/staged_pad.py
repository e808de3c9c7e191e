"""A Pad that reflects, repeats or wraps, and the pointwise operator before it in one launch.

Vocoders and audio codecs pad what an activation computed (MelGAN: Kumar et al., 2019; EnCodec: Défossez et al., 2022), and speaker
embeddings pad sums of parts (ECAPA-TDNN: Desplanques et al., 2020).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import Launch, Parameters
from optdnn.kernels.layout.gather import Pad
from optdnn.kernels.pointwise.before import moved, pointwise_before, stages_of
from optdnn.kernels.pointwise.expressions import CPP
from optdnn.kernels.pointwise.neighbors import THREADS, kernel, load, place, walk
from optdnn.kernels.pointwise.strides import broadcast, vector
from optdnn.kernels.tactic import TakesBefore
from optdnn.ops.base import Stage, attrs_dict
from optdnn.ops.fused import plain_stages
from optdnn.types import TensorType

REPEATING = ("reflect", "edge", "wrap")
"""The modes in which each element of the result is one of the operand."""


class StagedPad(TakesBefore, Pad):
    """A Pad whose every result is an element of its operand, which a pointwise operator computes for it alone."""

    name = "pad_staged"

    def refuse(self, b: Builder, op: Op) -> str | None:
        if (why := super().refuse(b, op)) is not None:
            return why
        if op.attrs.mode not in REPEATING:
            return "it pads with a constant"
        reader = b.graph.sole_user(op.value)
        if op.attrs.mode == "edge" and reader is not None and reader.kind in ("Conv", "ConvTranspose"):
            return "the convolution after it may repeat the edges itself"
        before = pointwise_before(b, op)
        return before if isinstance(before, str) else None

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        (before,) = self.neighbors(b.graph, op)
        shape, out = before.outputs[0].type.static_shape, b.target(op.value)
        operands = [None if v is None else b.operand(v) for v in before.inputs]
        indices = self.indices(b, op, shape)
        tables = {
            axis: b.constant(at.astype(np.int32), f"{op.outputs[0].name}.index{axis}") for axis, at in indices.items()
        }
        padded = Padded(tuple(operands), tuple(stages_of(before)), tuple(shape), out, tables)
        made, placed = padded.launch(b.arch)
        named = [None if v is None else b.operand(v) for v in op.inputs[1:]]
        attrs = attrs_dict(op.attrs) | {
            "prologue": plain_stages(moved(padded.stages, len(named))),
            "epilogue": (),
            "arity": 1 + len(named),
        }
        covers = replace(op, src=op.src | before.src)
        b.emit(covers, made, placed, "Pad", attrs, [operands[0], *named, *operands[1:]], [out])


@dataclass(frozen=True)
class Padded:
    """``out[o] = stages(operands)[index(o)]``. The operands broadcast to ``shape``. ``tables``: for each padded axis its indices, in int32."""

    operands: tuple[TensorView | None, ...]
    stages: tuple[Stage, ...]
    shape: tuple[int, ...]
    out: TensorView
    tables: Mapping[int, TensorView]

    @property
    def tensors(self) -> dict[int, TensorView]:
        """The operands by slot, in the shape of the stages' result."""
        present = ((i, x) for i, x in enumerate(self.operands) if x is not None)
        return {i: x.view(self.shape, broadcast(x, self.shape)) for i, x in present}

    def launch(self, arch: str) -> tuple[Launch, dict[str, TensorView]]:
        """The launch, and its operands by name."""
        axes = sorted(range(len(self.shape)), key=lambda i: (-self.out.strides[i], i))
        tensors = self.tensors
        dims = [self.out.shape[i] for i in axes]
        strides = [[x.strides[i] for i in axes] for x in (self.out, *tensors.values())]
        wide = 1 if axes[-1] in self.tables else vector([self.out, *tensors.values()], dims, strides)
        count = math.prod(dims) // wide
        placed = {"y": self.out, **{f"x{i}": x for i, x in tensors.items()}}
        placed |= {f"n{axis}": table for axis, table in self.tables.items()}
        parameters = Parameters().pointer(*placed).u32(count).i64(*(s for each in strides for s in each))
        text = self._source(axes, dims, wide)
        return parameters.generated(arch, text, "pad_staged", -(-count // THREADS), THREADS), placed

    def _source(self, axes: Sequence[int], dims: Sequence[int], wide: int) -> str:
        """The kernel's text. A thread computes ``wide`` neighbors along the last of ``axes``."""
        rank, out, tensors = len(axes), CPP[self.out.dtype], self.tensors
        fields = [f"{out}* y;", *(f"const {CPP[x.dtype]}* x{i};" for i, x in tensors.items())]
        fields += [f"const int* n{axis};" for axis in self.tables]
        fields += ["u32 count;", f"i64 sy[{rank}];", *(f"i64 s{i}[{rank}];" for i in tensors)]
        first, *steps = walk(dims, wide)
        before, loads, values = [first], list[str](), list[str]()
        for d, line in zip(reversed(range(rank)), steps, strict=True):
            before += [line, f"const int k{d} = {f'p.n{axes[d]}[o{d}]' if axes[d] in self.tables else f'o{d}'};"]
        for i, x in tensors.items():
            made, value = load(i, x, place(f"s{i}", rank, "k"), wide, wide > 1 and x.strides[axes[-1]] == 1)
            loads.append(made)
            values.append(value)
        types = [TensorType(self.out.dtype, ()) if x is None else TensorType(x.dtype, x.shape) for x in self.operands]
        return kernel("pad_staged", fields, before, loads, values, self.stages, types, self.out.dtype, rank, wide)
