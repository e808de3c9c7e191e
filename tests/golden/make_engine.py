"""How the engine files in this folder were made. Run once per format version, never again for an old one:

    python tests/golden/make_engine.py 1 tests/golden/engine-1.1

writes format 1.1 (1.0 likewise): ``engine-1.1.engine``, and ``engine-1.1.npz`` with the input "x" and the expected outputs.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np

from optdnn import Engine
from optdnn.ranges import DimRange
from optdnn.runtime.program import Buffer, ByValue, Kernel, Program, Ranks, Slot, Source
from optdnn.runtime.reference.nested import PlainGraph
from optdnn.runtime.reference.run import PlainStage
from optdnn.runtime.steps.reference import reference_step
from optdnn.types import BF16, FP32, INT64, Array, TensorSpec

LANES = (Slot(0), Slot(0), Slot(0), Slot(1, (2,)), Slot(0, (3,)), Slot(0), Slot(0))

COUNTS = PlainGraph(2, (), (), (1, 0), ((), (), (), ()))
"""The body of a loop that returns the numbers of its iterations."""


def golden_program(minor: int) -> Program:
    """A small convolutional classifier: fused stages, bf16 weights, int64 constants, a symbolic batch, special floats.

    From format 1.1 on also GPU kernels; from 1.2 on profiles; from 1.3 on an input that is a size; from 1.4 on lanes; from 1.5 on
    a retained buffer; from 1.6 on a loop without iterations, whose body has the types of its results; from 1.7 on two ranks, each
    of which holds the whole program.
    """
    rng = np.random.default_rng(2025)

    def weights(*shape: int, dtype: np.dtype = FP32) -> Array:
        return (rng.standard_normal(shape) * 0.4).astype(dtype)

    blobs = [weights(4, 3, 3, 3), weights(4), weights(4, 1, 1), np.array([0, -1], INT64), weights(4, 3, dtype=BF16)]
    conv = {
        "strides": (2, 2),
        "pads": (1, 1, 1, 1),
        "dilations": (1, 1),
        "group": 1,
        "auto_pad": "NOTSET",
        "prologue": (),
        "epilogue": (PlainStage("Mul", (-1, 3), {}), PlainStage("LeakyRelu", (-2,), {"alpha": 0.125})),
        "arity": 3,
    }
    intermediates = [
        ("conv", FP32, ("n", 4, 4, 4)),
        ("pooled", FP32, ("n", 4, 1, 1)),
        ("flat", FP32, ("n", 4)),
        ("features", BF16, ("n", 4)),
        ("logits", BF16, ("n", 3)),
        ("wide", FP32, ("n", 3)),
        ("y", FP32, ("n", 3)),
    ]
    kernels: tuple[Kernel, ...] = ()
    if minor >= 1:
        blobs.append(np.arange(16, dtype=np.uint8))
        header = "#define é 1\n"
        kernels = (
            Kernel(
                "general.cu", "body", "sm_90a", {"generated.cuh": header}, ("--std=c++17",), "0" * 64, len(blobs) - 1
            ),
            Kernel("general.cu", "body", "sm_90a", {}, (), "1" * 64),
        )
    sizes: tuple[tuple[TensorSpec, int], ...] = ()
    by_value = None
    if minor >= 3:
        sizes = ((TensorSpec("sizes", INT64, (2,)), 13),)
        blobs.append(np.zeros(3, np.uint8))  # without a model, no plan can be made
        by_value = ByValue(("sizes",), Source(len(blobs) - 1, {}, {})) if minor < 7 else None
    made = Program(
        target="reference",
        precision="fp32",
        inputs=((TensorSpec("x", FP32, ("n", 3, 8, 8)), 0), *sizes),
        outputs=((TensorSpec("y", FP32, ("n", 3)), 12), (TensorSpec("features", BF16, ("n", 4)), 9)),
        buffers=(
            Buffer("x", FP32, ("n", 3, 8, 8)),
            *(Buffer(f"constant {i}", b.dtype, b.shape, blob=i) for i, b in enumerate(blobs[:5])),
            *(Buffer(*entry) for entry in intermediates),
            *(Buffer(spec.name, spec.dtype, spec.shape) for spec, _ in sizes),
            *([Buffer("retained", BF16, (4,))] if minor >= 5 else []),
            *([Buffer("rows", INT64, (0,))] if minor >= 6 else []),
        ),
        steps=(
            reference_step("Conv", conv, (0, 1, 2, 3), (6,), ("/stem/conv", "/stem/scale", "/stem/act")),
            reference_step("GlobalAveragePool", {}, (6,), (7,), ("/pool",)),
            reference_step("Reshape", {"allowzero": False}, (7, 13 if sizes else 4), (8,), ("/flatten",)),
            reference_step("Cast", {"to": BF16}, (8,), (9,)),
            reference_step("MatMul", {}, (9, 5), (10,), ("/head",)),
            reference_step("Cast", {"to": FP32}, (10,), (11,)),
            reference_step("Softmax", {"axis": -1}, (11,), (12,), ("/softmax",)),
            *([reference_step("Cast", {"to": BF16}, (2,), (14,))] if minor >= 5 else []),
            *([reference_step("Loop", {"body": COUNTS, "carried": 0}, (4, -1), (15,))] if minor >= 6 else []),
        ),
        blobs=blobs,
        requires=("package:numpy>=1.0",),
        meta={"options": {"opt_level": 3, "budget": float("inf")}, "$escaped": ["é", None, True, 0.1]},
        kernels=kernels,
        by_value=by_value,
        profiles=({"n": DimRange(1, 2, 4)}, {"n": DimRange(8, 8, 8)}) if minor >= 2 else (),
        # The step that writes the features has its own lane, which an older reader must refuse.
        lanes=(*LANES, *[Slot(0)] * (min(minor, 6) - 4)) if minor >= 4 else (),
        retained=(14,) if minor >= 5 else (),
    )
    if minor < 7:
        return made
    whole = tuple(-1 for _ in made.inputs), tuple(-1 for _ in made.outputs)
    return replace(made, ranks=Ranks((made,), *whole))


if __name__ == "__main__":
    engine = Engine(golden_program(int(sys.argv[1])))
    x = np.random.default_rng(7).standard_normal((2, 3, 8, 8)).astype(np.float32)
    results = engine.run({"x": x, **({"sizes": np.array([0, -1])} if len(engine.inputs) > 1 else {})})
    engine.save(f"{sys.argv[2]}.engine")
    np.savez(f"{sys.argv[2]}.npz", x=x, y=results["y"], features=results["features"].astype(np.float32))
