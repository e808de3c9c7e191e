"""Operators on operands without elements, as after a selection that selects nothing.

As a program (``python empty_cases.py OUT``) this writes ONNX Runtime's results for each of ``CASES``.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
from onenode import Case, onnxruntime_outputs


def f32(*shape: int) -> Any:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def ints(*values: int) -> Any:
    return np.array(values, np.int64)


def none(*shape: int, dtype: Any = np.int64) -> Any:
    return np.zeros(shape, dtype)


E, ROW, IMAGES, PIXELS = f32(0, 3), f32(3), f32(0, 4, 6, 6), f32(2, 4, 0, 6)
U8 = np.uint8
SCALE = (np.array(0.1, np.float32), np.array(3, U8))
UNARY = (
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Celu", "Cos", "Cosh", "Elu", "Erf", "Exp", "Floor"),
    *("Gelu", "HardSigmoid", "HardSwish", "Identity", "IsInf", "IsNaN", "LeakyRelu", "Log", "Mish", "Neg", "Reciprocal", "Relu"),
    *("Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Tan", "Tanh"),
    *("ThresholdedRelu", "Clip", "Shape", "Size", "Hardmax", "Softmax", "LogSoftmax"),
)  # fmt: skip
BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Mean", "Sum", "Pow", "PRelu")
COMPARE = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
REDUCE = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")


def case(op: str, inputs: list[Any], attrs: dict[str, Any] | None = None, opset: int = 22, outputs: int = 1) -> Case:
    return Case(op, inputs, attrs or {}, opset, outputs)


CASES: list[Case] = [
    *(case(op, [E]) for op in UNARY),
    *(case(op, [E, ROW]) for op in (*BINARY, *COMPARE)),
    *(case(op, [f32(2, 0), f32(2, 1)]) for op in BINARY[:-1]),
    *(case(op, [none(0, 3, dtype=bool), np.ones(3, bool)]) for op in ("And", "Or", "Xor")),
    *(case(op, [none(0, 3), ints(1, 2, 3)]) for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "Mod")),
    case("Mod", [E, ROW], {"fmod": 1}),
    case("BitShift", [none(0, dtype=U8), none(0, dtype=U8)], {"direction": "LEFT"}),
    case("BitwiseNot", [none(0, 3)]),
    case("Not", [none(0, 3, dtype=bool)]),
    case("Where", [none(0, 3, dtype=bool), E, ROW]),
    case("Cast", [E], {"to": 7}),
    case("Trilu", [f32(0, 3)]),
    case("Trilu", [f32(2, 0, 3), np.array(1)]),
    case("EyeLike", [f32(0, 3)]),
    # reductions: over an empty axis, and with an empty axis elsewhere
    *(case(f"Reduce{k}", [E, ints(0)], {}, 18) for k in REDUCE),
    *(case(f"Reduce{k}", [E, ints(1)], {}, 18) for k in REDUCE),
    *(case(f"Reduce{k}", [f32(2, 0, 3), ints(0, 1)], {"keepdims": 0}, 18) for k in REDUCE),
    *(case(f"Reduce{k}", [f32(2, 0, 3)], {"keepdims": 0}, 18) for k in REDUCE),
    *(case(f"Reduce{k}", [f32(2, 0, 3), none(0)], {"noop_with_empty_axes": 1}, 18) for k in REDUCE),
    *(case(f"Reduce{k}", [none(2, 0), ints(1)], {}, 18) for k in ("Sum", "Prod", "Max", "Min", "Mean", "L1", "SumSquare")),
    *(case(op, [E], {"axis": 1, "keepdims": k, "select_last_index": k}) for op in ("ArgMax", "ArgMin") for k in (0, 1)),
    # data movement
    case("Concat", [E, f32(2, 3)], {"axis": 0}),
    case("Concat", [f32(2, 0), f32(2, 0)], {"axis": 1}),
    case("Concat", [f32(0, 1), f32(0, 2)], {"axis": 1}),
    case("Split", [E, ints(1, 2)], {"axis": 1}, 18, 2),
    case("Split", [E, ints(0, 0)], {"axis": 0}, 18, 2),
    case("Split", [f32(2, 3), ints(0, 2)], {"axis": 0}, 18, 2),
    case("Slice", [E, ints(1), ints(3), ints(1)]),
    case("Slice", [E, ints(0), ints(9), ints(0)]),
    case("Slice", [f32(4, 3), ints(2), ints(2), ints(0)]),
    case("Slice", [E, ints(-1), ints(-9), ints(0), ints(-1)]),
    case("Pad", [E, ints(1, 0, 2, 1)]),
    case("Pad", [E, ints(0, 1, 0, 1)], {"mode": "edge"}),
    case("Pad", [E, ints(0, 1, 0, 1)], {"mode": "reflect"}),
    case("Tile", [E, ints(2, 2)]),
    case("Tile", [f32(2, 3), ints(0, 2)]),
    case("Expand", [f32(1, 3), ints(0, 3)]),
    case("Expand", [f32(1, 1), ints(2, 0, 3)]),
    case("Reshape", [E, ints(3, 0)], {"allowzero": 1}),
    case("Reshape", [E, ints(0, 3)]),
    case("Reshape", [E, ints(-1, 3)]),
    case("Reshape", [f32(0, 4, 6), ints(0, 24)]),
    case("Flatten", [f32(0, 3, 4)], {"axis": 1}),
    case("Flatten", [f32(2, 0, 4)], {"axis": 2}),
    case("Flatten", [f32(2, 0, 4)], {"axis": 0}),
    case("Squeeze", [f32(0, 1, 3), ints(1)]),
    case("Squeeze", [f32(0, 1, 3)]),
    case("Unsqueeze", [E, ints(0)]),
    case("Transpose", [f32(0, 3, 4)], {"perm": [2, 0, 1]}),
    case("DepthToSpace", [IMAGES], {"blocksize": 2}),
    case("DepthToSpace", [PIXELS], {"blocksize": 2, "mode": "CRD"}),
    case("SpaceToDepth", [IMAGES], {"blocksize": 2}),
    case("SpaceToDepth", [PIXELS], {"blocksize": 2}),
    # by index
    case("Gather", [f32(4, 3), none(0)], {"axis": 0}),
    case("Gather", [f32(4, 3), none(2, 0)], {"axis": 1}),
    case("Gather", [E, ints(0, 2)], {"axis": 1}),
    case("Gather", [E, none(0)], {"axis": 0}),
    case("GatherElements", [f32(4, 3), none(0, 3)], {"axis": 0}),
    case("GatherElements", [E, none(0, 2)], {"axis": 1}),
    case("GatherElements", [E, none(0, 3)], {"axis": 0}),
    case("GatherND", [f32(4, 3), none(0, 2)]),
    case("GatherND", [f32(4, 3), none(0, 1)]),
    case("GatherND", [f32(2, 0), none(0, 2)]),
    case("GatherND", [f32(2, 0), ints(0, 1).reshape(2, 1)]),
    case("GatherND", [E, none(0, 1)]),
    case("GatherND", [none(0), none(0, 1)]),
    case("GatherND", [f32(0, 4, 3), none(0, 2, 1)], {"batch_dims": 1}),
    case("GatherND", [f32(2, 4, 3), none(2, 0, 1)], {"batch_dims": 1}),
    case("GatherND", [f32(2, 4, 0), none(2, 3, 1)], {"batch_dims": 1}),
    case("ScatterElements", [f32(4, 3), none(0, 3), f32(0, 3)], {"axis": 0}),
    case("ScatterElements", [E, none(0, 3), f32(0, 3)], {"axis": 1}),
    case("ScatterElements", [f32(4, 3), none(0, 3), f32(0, 3)], {"axis": 0, "reduction": "add"}),
    case("ScatterND", [f32(4, 3), none(0, 1), f32(0, 3)]),
    case("ScatterND", [f32(4, 3), none(0, 2), f32(0)]),
    case("ScatterND", [f32(4, 0), ints(1, 2).reshape(2, 1), f32(2, 0)]),
    case("ScatterND", [E, none(0, 1), f32(0, 3)]),
    case("ScatterND", [f32(4, 3), none(0, 1), f32(0, 3)], {"reduction": "max"}),
    case("Compress", [f32(4, 3), np.zeros(4, bool)], {"axis": 0}),
    case("Compress", [E, none(0, dtype=bool)], {"axis": 0}),
    case("Compress", [E, none(0, dtype=bool)]),
    case("NonZero", [E]),
    case("NonZero", [np.zeros((2, 3), np.float32)]),
    case("Unique", [f32(0)], {"sorted": 1}, 22, 4),
    case("Unique", [E], {"axis": 0}, 22, 4),
    case("Unique", [E], {}, 22, 4),
    case("TopK", [E, ints(2)], {"axis": 1}, 22, 2),
    case("TopK", [E, ints(0)], {"axis": 0}, 22, 2),
    case("TopK", [f32(4, 3), ints(0)], {"axis": 1}, 22, 2),
    case("OneHot", [none(0), np.array(4), f32(2)]),
    case("OneHot", [none(2, 0), np.array(4), f32(2)], {"axis": 0}),
    case("CumSum", [E, np.array(0)]),
    case("CumSum", [E, np.array(1)], {"exclusive": 1, "reverse": 1}),
    case("CumSum", [f32(2, 0), np.array(1)], {"exclusive": 1}),
    case("ReverseSequence", [f32(4, 0, 3), none(0)]),
    case("Range", [np.array(3), np.array(3), np.array(1)]),
    case("Range", [np.array(3), np.array(1), np.array(1)]),
    case("ConstantOfShape", [ints(0, 3)]),
    case("ConstantOfShape", [none(0)]),
    # products
    case("MatMul", [E, f32(3, 4)]),
    case("MatMul", [f32(2, 0), f32(0, 4)]),
    case("MatMul", [f32(2, 3), f32(3, 0)]),
    case("MatMul", [f32(0, 2, 3), f32(3, 4)]),
    case("MatMul", [f32(2, 0, 3), f32(2, 3, 4)]),
    case("MatMul", [f32(0), f32(0)]),
    case("Gemm", [E, f32(3, 4), f32(4)]),
    case("Gemm", [E, f32(3, 4)]),
    case("Gemm", [f32(2, 0), f32(0, 4), f32(4)]),
    case("Gemm", [f32(2, 3), f32(0, 3), None], {"transB": 1}),
    case("Einsum", [E, f32(3, 4)], {"equation": "ij,jk->ik"}),
    case("Einsum", [f32(2, 0), f32(0, 4)], {"equation": "ij,jk->ik"}),
    case("Einsum", [f32(0, 2, 3), f32(0, 3, 4)], {"equation": "bij,bjk->bik"}),
    case("Einsum", [E], {"equation": "ij->"}),
    case("MatMulInteger", [none(0, 3, dtype=U8), none(3, 4, dtype=U8)]),
    case("Det", [f32(0, 3, 3)]),
    case("Det", [f32(2, 0, 0)]),
    # images
    case("Conv", [IMAGES, f32(8, 4, 3, 3), f32(8)], {"pads": [1, 1, 1, 1]}),
    case("Conv", [IMAGES, f32(4, 1, 3, 3)], {"group": 4, "strides": [2, 2]}),
    case("ConvTranspose", [IMAGES, f32(4, 2, 3, 3)], {"strides": [2, 2]}),
    case("ConvInteger", [none(0, 4, 6, 6, dtype=U8), none(8, 4, 3, 3, dtype=U8)]),
    *(case(f"{k}Pool", [IMAGES], {"kernel_shape": [2, 2], "strides": [2, 2]}) for k in ("Max", "Average", "Lp")),
    case("MaxPool", [IMAGES], {"kernel_shape": [2, 2], "strides": [2, 2]}, 22, 2),
    *(case(f"Global{k}Pool", [x], {}, 2) for k in ("Max", "Average", "Lp") for x in (IMAGES,)),
    case("Conv", [f32(2, 0, 6, 6), f32(8, 0, 3, 3)]),
    case("Conv", [f32(2, 4, 6, 6), f32(0, 4, 3, 3)]),
    case("MaxUnpool", [f32(0, 4, 3, 3), none(0, 4, 3, 3)], {"kernel_shape": [2, 2], "strides": [2, 2]}),
    case("Resize", [IMAGES, None, None, ints(0, 4, 12, 12)], {"mode": "nearest"}),
    case("Resize", [IMAGES, None, np.array([1, 1, 2, 2], np.float32)], {"mode": "linear"}),
    case("Resize", [IMAGES, None, np.array([1, 1, 2, 2], np.float32)], {"mode": "cubic"}),
    case("GridSample", [IMAGES, f32(0, 3, 3, 2)]),
    case("GridSample", [f32(2, 4, 6, 6), f32(2, 0, 3, 2)]),
    case("RoiAlign", [f32(1, 4, 6, 6), f32(0, 4), none(0)], {"output_height": 2, "output_width": 2}, 16),
    case("MaxRoiPool", [f32(1, 4, 6, 6), f32(0, 5)], {"pooled_shape": [2, 2]}, 1),
    case("NonMaxSuppression", [f32(1, 0, 4), f32(1, 1, 0), ints(5), f32(1), f32(1)]),
    case("NonMaxSuppression", [f32(0, 6, 4), f32(0, 1, 6), ints(5), f32(1), f32(1)]),
    case("NonMaxSuppression", [f32(1, 6, 4), f32(1, 0, 6), ints(5), f32(1), f32(1)]),
    case("AffineGrid", [f32(0, 2, 3), ints(0, 1, 4, 4)]),
    case("Col2Im", [f32(0, 9, 16), ints(6, 6), ints(3, 3)]),
    case("DeformConv", [IMAGES, f32(8, 4, 3, 3), f32(0, 18, 4, 4)]),
    # norms
    case("BatchNormalization", [IMAGES, f32(4), f32(4), f32(4), np.ones(4, np.float32)]),
    case("InstanceNormalization", [IMAGES, f32(4), f32(4)]),
    case("InstanceNormalization", [PIXELS, f32(4), f32(4)]),
    case("BatchNormalization", [PIXELS, f32(4), f32(4), f32(4), np.ones(4, np.float32)]),
    case("MeanVarianceNormalization", [PIXELS]),
    case("LRN", [PIXELS], {"size": 3}),
    case("LpNormalization", [f32(2, 0)], {"axis": 1}),
    case("LayerNormalization", [E, f32(3), f32(3)]),
    case("LayerNormalization", [E, f32(3), f32(3)], {}, 22, 3),
    case("LRN", [IMAGES], {"size": 3}),
    case("LpNormalization", [E], {"axis": 1}),
    case("MeanVarianceNormalization", [IMAGES]),
    case("RMSNormalization", [E, f32(3)], {}, 23),
    # quantization
    case("QuantizeLinear", [E, *SCALE]),
    case("DequantizeLinear", [none(0, 3, dtype=U8), *SCALE]),
    case("DequantizeLinear", [none(0, 3, dtype=U8), np.ones(3, np.float32), none(3, dtype=U8)], {"axis": 1}),
    case("DynamicQuantizeLinear", [E], {}, 22, 3),
    case("QLinearMatMul", [none(0, 3, dtype=U8), *SCALE, none(3, 4, dtype=U8), *SCALE, *SCALE]),
    # sequences
    case("RNN", [f32(0, 2, 3), f32(1, 4, 3), f32(1, 4, 4)], {"hidden_size": 4}, 22, 2),
    case("RNN", [f32(5, 0, 3), f32(1, 4, 3), f32(1, 4, 4)], {"hidden_size": 4}, 22, 2),
    case("LSTM", [f32(0, 2, 3), f32(1, 16, 3), f32(1, 16, 4)], {"hidden_size": 4}, 22, 3),
    case("LSTM", [f32(0, 2, 3), f32(2, 16, 3), f32(2, 16, 4), None, None, f32(2, 2, 4), f32(2, 2, 4)],
         {"hidden_size": 4, "direction": "bidirectional"}, 22, 3),
    case("RotaryEmbedding", [f32(0, 2, 3, 4), f32(0, 3, 2), f32(0, 3, 2)], {}, 23),
    case("DFT", [f32(0, 8, 1), None, np.array(1)], {}, 20),
    case("STFT", [f32(0, 16, 1), np.array(4), f32(8)], {}, 17),
]  # fmt: skip

"""Cases that ONNX Runtime accepts."""

PADDED = {"kernel_shape": [2, 2], "pads": [1, 1, 1, 1]}
OWN: list[tuple[Case, list[Any]]] = [
    (case("Split", [E], {"axis": 0, "num_outputs": 2}, 18, 2), [E, E]),
    (case("Pad", [E, ints(0, 1, 0, 1)], {"mode": "wrap"}, 19), [f32(0, 5)]),
    (case("Reshape", [E, ints(0, -1)]), [E]),
    (case("OneHot", [ints(0, 1), np.array(0), f32(2)]), [f32(2, 0)]),
    (case("MatMulInteger", [none(2, 0, dtype=U8), none(0, 4, dtype=U8)]), [none(2, 4, dtype=np.int32)]),  # not written
    (case("MaxPool", [PIXELS], PADDED, 19), [np.full((2, 4, 1, 7), -np.inf, np.float32)]),
    (case("LpPool", [PIXELS], PADDED, 19), [none(2, 4, 1, 7, dtype=np.float32)]),
    (case("GlobalAveragePool", [PIXELS]), [none(2, 4, 1, 1, dtype=np.float32)]),
    (case("Conv", [PIXELS, f32(8, 4, 3, 3)], {"pads": [1, 1, 1, 1]}), [f32(2, 8, 0, 6)]),
    (case("LayerNormalization", [f32(2, 0), f32(0), f32(0)]), [f32(2, 0)]),
    (case("GroupNormalization", [IMAGES, f32(4), f32(4)], {"num_groups": 2}), [IMAGES]),
    # ONNX Runtime ends the process
    (case("GRU", [f32(0, 2, 3), f32(1, 12, 3), f32(1, 12, 4)], {"hidden_size": 4}, 22, 2),
     [f32(0, 1, 2, 4), none(1, 2, 4, dtype=np.float32)]),
    (case("GRU", [f32(5, 0, 3), f32(1, 12, 3), f32(1, 12, 4)], {"hidden_size": 4}, 22, 2), [f32(5, 1, 0, 4), f32(1, 0, 4)]),
    (case("LSTM", [f32(5, 0, 3), f32(1, 16, 3), f32(1, 16, 4)], {"hidden_size": 4}, 22, 3),
     [f32(5, 1, 0, 4), f32(1, 0, 4), f32(1, 0, 4)]),
    (case("Attention", [f32(0, 2, 3, 4), f32(0, 2, 5, 4), f32(0, 2, 5, 4)], {}, 23), [f32(0, 2, 3, 4)]),
    (case("Attention", [f32(1, 2, 0, 4), f32(1, 2, 5, 4), f32(1, 2, 5, 4)], {}, 23), [f32(1, 2, 0, 4)]),
    (case("Attention", [f32(1, 2, 3, 4), f32(1, 2, 0, 4), f32(1, 2, 0, 4)], {}, 23), [none(1, 2, 3, 4, dtype=np.float32)]),
]  # fmt: skip
"""Cases that ONNX Runtime refuses, or answers with numbers that it has not written, and their expected results."""


def main() -> None:
    found: dict[int, Any] = {}
    for k, one in enumerate(CASES):
        try:
            found[k] = onnxruntime_outputs(one)
        except Exception as error:
            found[k] = str(error)
    Path(sys.argv[1]).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main()
