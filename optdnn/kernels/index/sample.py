"""The next token from logits (``sample.cu``): one launch with a block per sequence."""

from __future__ import annotations

from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.launch import GENERAL, Launch, Parameters
from optdnn.kernels.tactic import Tactic
from optdnn.ops.sampling import SETTINGS
from optdnn.runtime.cuda.compile import render
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.types import BF16, FP16, FP32

VOCABULARY_LIMIT = 1 << 18
"""Most tokens: 14-bit halves of their masses are summed in 32 bits."""
VECTOR_BYTES = 16


def lanes(logits: TensorView) -> int:
    """Elements of an access: rows consist of whole, aligned accesses."""
    count = VECTOR_BYTES // logits.dtype.itemsize
    pitch = logits.strides[0] if logits.shape[0] > 1 else 0
    while count > 1 and (logits.shape[1] % count or pitch % count or logits.offset % count):
        count //= 2
    return count


def threads(vocabulary: int) -> int:
    """Threads of a block: a small vocabulary keeps only few threads busy."""
    return 1024 if vocabulary > 8192 else 256


def refuse(logits: TensorView) -> str | None:
    """Why there is no launch for these logits, or None."""
    if logits.dtype not in (FP16, BF16, FP32):
        return "it is for 16-bit and 32-bit logits"
    if logits.shape[1] > VOCABULARY_LIMIT:
        return f"it is for at most {VOCABULARY_LIMIT} tokens"
    return "the logits of a sequence are not contiguous" if logits.strides[1] != 1 else None


def launch(logits: TensorView, settings: list[TensorView], token: TensorView, arch: str) -> Launch:
    """The launch. Operands: ``logits``, the settings by name, and ``token``."""
    batch, vocabulary = logits.shape
    block = threads(vocabulary)
    defines = {
        "THREADS": block, "LANES": lanes(logits), "WIDE": int(logits.dtype == FP32), "BFLOAT": int(logits.dtype == BF16),
    }  # fmt: skip
    recipe = Recipe("sample.cu", arch, {"generated.cuh": f"{render.constants(defines)}\n"}, GENERAL)
    steps = [t.strides[0] for t in (logits, *settings, token)]
    parameters = Parameters().pointer("logits", *SETTINGS, "token").i64(*steps).u32(vocabulary)
    return parameters.launch(recipe, "sample", batch, block)


class Sample(Tactic):
    """SampleToken of logits in contiguous rows."""

    name = "sample"

    def refuse(self, b: Builder, op: Op) -> str | None:
        return refuse(b.source(op.inputs[0]))

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        reads = [b.operand(v) for v in op.inputs]
        logits, *settings = reads
        token = b.target(op.value)
        if not token.size:
            return
        operands = {"logits": logits, **dict(zip(SETTINGS, settings, strict=True)), "token": token}
        b.emit(op, launch(logits, settings, token, b.arch), operands, op.kind, {}, reads, [token])
