"""Networks that OpenVINO computes wrongly or crashes on: each is recognized, and right with the faulty operator run elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx.parser
import pytest
from support.sweep import sweep

from optdnn.compiler import build_verbose
from optdnn.config import BuildOptions
from optdnn.importers.onnx import import_model
from optdnn.lowering.cpu.openvino_faults import known_faults
from optdnn.types import Array

ort = pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")
pytest.importorskip("openvino", reason="the cpu extra is not installed")

REQUANTIZED = """
    q = QuantizeLinear(c, s1, z1)
    d = DequantizeLinear(q, s1, z1)
    y = QuantizeLinear(d, s2, z2)"""
NORM = "g = GroupNormalization<num_groups = 4>(a, scale, bias)"
SCALES = "float[8] scale = {1, 2, 3, 4, 5, 6, 7, 8}, float[8] bias = {1, 1, 1, 1, 2, 2, 2, 2}"


def ceil_pool(kernel: int, stride: int, end: int) -> str:
    return f"y = MaxPool<kernel_shape = [{kernel}], strides = [{stride}], pads = [1, {end}], ceil_mode = 1>(x)"


def quantized_conv(kernel: int, stride: int, pad: int) -> str:
    return f"""
    q = QuantizeLinear(x, s, z)
    d = DequantizeLinear(q, s, z)
    dw = DequantizeLinear(w, s, zw)
    y = Conv<kernel_shape = [{kernel}], strides = [{stride}], pads = [{pad}, {pad}]>(d, dw)"""


def grouped(groups: int, zero: int, kind: str, between: int, step: str = "Identity") -> tuple[str, str]:
    """Constants and nodes of a grouped convolution of uint8, and of one of its result as ``kind``. Zero points: ``zero``,
    ``between``."""
    rng = np.random.default_rng(1)
    w, v = (", ".join(map(str, rng.integers(-127, 128, n))) for n in (16 // groups, 16))
    constants = (
        f"float s = {{0.0177}}, uint8 z = {{{zero}}}, float s2 = {{0.0267}}, {kind} z2 = {{{between}}}, float sw = {{0.007}}, "
        f"int8[4, {4 // groups}, 1, 1] w = {{{w}}}, int8[4, 4, 1, 1] v = {{{v}}}"
    )
    nodes = f"""
    d = DequantizeLinear(x, s, z) e = DequantizeLinear(w, sw) c = Conv<group = {groups}>(d, e) a = {step}(c)
    q = QuantizeLinear(a, s2, z2) b = DequantizeLinear(q, s2, z2) f = DequantizeLinear(v, sw) y = Conv(b, f)"""
    return constants, nodes


DEQUANTIZED = "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)"
INT8 = "float s = {0.02405719}, int8 z = {0}, float s2 = {0.023881}, int8 z2 = {1}"
BOUNDS = "float low = {-0.61}, float high = {0.505}"
WEIGHTS = "float sw = {0.02}, int8[2, 2, 1, 1] w = {50, -27, 13, 44}"
PICTURE = "float[3, 2, 8, 8] x"
POOLED = "y = AveragePool<kernel_shape = [3], strides = [2], pads = [1, 1], count_include_pad = 1>(d)"
ROWS = "float s = {0.025}, uint8 z = {100}, int64[1] axes = {2}"
SMALL_LSTM = "float[1, 8, 3] w, float[1, 8, 2] r, float[1, 6] p"
LSTM = "y, h, c = LSTM<hidden_size = 2>(x, w, r, , , , , p)"
RNN = "float[4, 2, 3] x, float[2, 2, 3] w, float[2, 2, 2] r"
ATTENTION = "t = Transpose<perm = [0, 1, 3, 2]>(k) s = MatMul(q, t) w = Softmax(s) m = MatMul(w, v)"
LAYERS = """
    g = MatMul(x, v) q = QuantizeLinear(g, s, z) d = DequantizeLinear(q, s, z) r = Sigmoid(d)
    b = QuantizeLinear(r, s, z) c = DequantizeLinear(b, s, z) e = DequantizeLinear(w, sw) m = MatMul(c, e)
    y = QuantizeLinear(m, s, z)"""
SMALL = (
    "float[2, 4] v = {0.5, -1, 0.7, 0.1, 0.9, 0.3, -0.4, 1}, "
    "int8[4, 2] w = {50, -27, 13, 44, 90, 3, -70, 11}, float sw = {0.01}"
)
BYTES = "uint8[1, 4, 6, 6] x"
CHANNELS = "float[1, 5, 1] c = {1, 2, 3, 4, 5}"


# name: inputs, outputs, constants, nodes, the faulty operator or None
CASES: dict[str, tuple[str, str, str, str, str | None]] = {
    "a quantized concatenation, quantized again": (
        "float[7, 6] x, float[7, 16] b",
        "uint8[7, 22] y",
        "float s1 = {0.0093}, uint8 z1 = {128}, float s2 = {0.02}, uint8 z2 = {0}",
        f"c = Concat<axis = 1>(x, b) {REQUANTIZED}",
        "QuantizeLinear",
    ),
    "without a zero point": (
        "float[7, 6] x, float[7, 16] b",
        "uint8[7, 22] y",
        "float s1 = {0.0093}, uint8 z1 = {0}, float s2 = {0.02}, uint8 z2 = {0}",
        f"c = Concat<axis = 1>(x, b) {REQUANTIZED}",
        None,
    ),
    "a normalization and its operand": (
        "float[4, 8, 5, 5] x", "float[4, 8, 5, 5] y", SCALES, f"a = Relu(x) {NORM} y = Add(g, a)", "Add",
    ),
    "a normalization and a function of its operand": (
        "float[4, 8, 5, 5] x", "float[4, 8, 5, 5] y", SCALES, f"a = Relu(x) {NORM} e = Sigmoid(a) y = Mul(e, g)", "Mul",
    ),
    "a normalization and something else": (
        "float[4, 8, 5, 5] x, float[4, 8, 5, 5] b", "float[4, 8, 5, 5] y", SCALES, f"a = Relu(x) {NORM} y = Add(g, b)", None,
    ),
    "a sum of bytes": ("uint8[64] x, uint8[64] b", "uint8[64] y", "", "y = Add(x, b)", "Add"),
    "a product of signed bytes": ("int8[64] x, int8[64] b", "int8[64] y", "", "y = Mul(x, b)", "Mul"),
    "the larger of two bytes": ("uint8[64] x, uint8[64] b", "uint8[64] y", "", "y = Max(x, b)", None),
    "a sum of integers of 32 bits": ("int32[64] x, int32[64] b", "int32[64] y", "", "y = Add(x, b)", None),
    "a remainder": (
        "int32[64] x", "int32[64] y", "int32 k = {17}, int32 m = {99999989}", "l = Mul(x, m) y = Mod(l, k)", "Mod",
    ),
    "places among equals": (
        "int32[6, 20] x", "int32[6, 7] v, int64[6, 7] y", "int64[1] k = {7}", "v, y = TopK<axis = 1>(x, k)", "TopK",
    ),
    "the largest alone": ("int32[6, 20] x", "int32[6, 7] v", "int64[1] k = {7}", "v, y = TopK<axis = 1>(x, k)", None),
    "a window in the padding": ("float[2, 3, 7] x", "float[2, 3, n] y", "", ceil_pool(2, 3, 1), "MaxPool"),
    "a window in the padding, of any batch": ("float[N, 3, 7] x", "float[N, 3, n] y", "", ceil_pool(2, 3, 1), "MaxPool"),
    "a window that may be": ("float[2, 3, L] x", "float[2, 3, n] y", "", ceil_pool(2, 3, 1), "MaxPool"),
    "a window that never is": ("float[2, 3, L] x", "float[2, 3, n] y", "", ceil_pool(3, 2, 1), None),
    "no window in the padding": ("float[2, 3, 6] x", "float[2, 3, n] y", "", ceil_pool(2, 3, 1), None),
    "a quantized convolution of one element": (
        "float[1, 2, 16] x", "float[1, 2, n] y",
        "float s = {0.02}, int8 z = {3}, int8[2, 2, 1] w = {1, -2, 3, -4}, int8 zw = {0}", quantized_conv(1, 3, 1), "Conv",
    ),
    "a quantized convolution of three": (
        "float[1, 2, 16] x", "float[1, 2, n] y",
        "float s = {0.02}, int8 z = {3}, int8[2, 2, 3] w = {1, -2, 3, -4, 5, 6, 7, 8, 9, 1, 2, 3}, int8 zw = {0}",
        quantized_conv(3, 3, 1), None,
    ),
    "int8 with another scale": (
        PICTURE, "int8[3, 2, 8, 8] y", INT8, f"{DEQUANTIZED} y = QuantizeLinear(d, s2, z)", "QuantizeLinear",
    ),
    "int8 with another scale, transposed": (
        PICTURE, "int8[2, 3, 8, 8] y", INT8,
        f"{DEQUANTIZED} t = Transpose<perm = [1, 0, 2, 3]>(d) y = QuantizeLinear(t, s2, z)", "QuantizeLinear",
    ),
    "int8 with the same scale": (
        PICTURE, "int8[3, 2, 7, 7] y", INT8,
        f"{DEQUANTIZED} t = MaxPool<kernel_shape = [2, 2]>(d) y = QuantizeLinear(t, s, z)", None,
    ),
    "int8 with a zero point": (PICTURE, "int8[3, 2, 8, 8] y", INT8, f"{DEQUANTIZED} y = QuantizeLinear(d, s2, z2)", None),
    "bounds of quantized values": (
        PICTURE, "float[3, 2, 8, 8] y", f"{INT8}, {BOUNDS}", f"{DEQUANTIZED} y = Clip(d, low, high)", "Clip",
    ),
    "a bound of shifted values": (
        PICTURE, "float[3, 2, 8, 8] y", f"{INT8}, {BOUNDS}", f"{DEQUANTIZED} a = Add(d, s) t = MaxPool<kernel_shape = [1, 1]>(a) "
        "y = Clip(t, low, high)", "Clip",
    ),
    "bounds of a quantized convolution": (
        PICTURE, "float[3, 2, 8, 8] y", f"{INT8}, {BOUNDS}, {WEIGHTS}",
        f"{DEQUANTIZED} v = DequantizeLinear(w, sw, z) a = Conv(d, v) y = Clip(a, low, high)", None,
    ),
    "averages of averages": (
        PICTURE, "float[3, 2, 1, 1] y", INT8,
        f"{DEQUANTIZED} a = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(d) y = GlobalAveragePool(a)", "AveragePool",
    ),
    "averages that are quantized": (
        PICTURE, "int8[3, 2, 4, 4] y", INT8,
        f"{DEQUANTIZED} a = AveragePool<kernel_shape = [2, 2], strides = [2, 2]>(d) y = QuantizeLinear(a, s2, z2)", None,
    ),
    "padding that counts, with a zero point": (
        "float[3, 2, 8] x", "float[3, 2, 4] y", "float s = {0.025}, uint8 z = {100}", f"{DEQUANTIZED} {POOLED}", "AveragePool",
    ),
    "padding that counts, without a zero point": (
        "float[3, 2, 8] x", "float[3, 2, 4] y", "float s = {0.025}, int8 z = {0}", f"{DEQUANTIZED} {POOLED}", None,
    ),
    "an average of three axes": (
        "float[3, 2, 8] x", "float[3, 2, 1] y", ROWS, f"{DEQUANTIZED} y = GlobalAveragePool(d)", "GlobalAveragePool",
    ),
    "a sum of three axes": (
        "float[3, 2, 8] x", "float[3, 2] y", ROWS, f"{DEQUANTIZED} y = ReduceSum<keepdims = 0>(d, axes)", "ReduceSum",
    ),
    "a maximum of three axes": (
        "float[3, 2, 8] x", "float[3, 2, 1] y", ROWS, f"{DEQUANTIZED} y = ReduceMax<keepdims = 1>(d, axes)", None,
    ),
    "an average of four axes": (
        "float[3, 2, 8, 8] x", "float[3, 2, 1, 1] y", ROWS, f"{DEQUANTIZED} y = GlobalAveragePool(d)", None,
    ),
    "a convolution that leaves one column": (
        "float[1, 1, 5, 5] x, float[3, 1, 3, 5] w", "float[1, 3, 5, 1] y", "",
        "y = Conv<kernel_shape = [3, 5], strides = [1, 3], pads = [1, 1, 1, 1]>(x, w)", "Conv",
    ),
    "a convolution that leaves two columns": (
        "float[1, 1, 5, 6] x, float[3, 1, 3, 5] w", "float[1, 3, 5, 2] y", "",
        "y = Conv<kernel_shape = [3, 5], strides = [1, 3], pads = [1, 1, 1, 1]>(x, w)", None,
    ),
    "an LSTM with peepholes": (
        f"float[4, 2, 3] x, {SMALL_LSTM}", "float[4, 1, 2, 2] y", "", LSTM, "LSTM",
    ),
    "an LSTM without peepholes": (
        f"float[4, 2, 3] x, {SMALL_LSTM}", "float[4, 1, 2, 2] y, float[1, 6] u", "",
        f"{LSTM.replace(', , , , , p', '')} u = Neg(p)", None,
    ),
    "as many heads as tokens": (
        "float[2, 3, 3, 8] q, float[2, 3, 5, 8] k, float[2, 3, 5, 8] v", "float[2, 3, 3, 8] y", "",
        f"{ATTENTION} y = Transpose<perm = [0, 2, 1, 3]>(m)", "Transpose",
    ),
    "more tokens than heads": (
        "float[2, 3, 4, 8] q, float[2, 3, 5, 8] k, float[2, 3, 5, 8] v", "float[2, 4, 3, 8] y", "",
        f"{ATTENTION} y = Transpose<perm = [0, 2, 1, 3]>(m)", None,
    ),
    "activations of each direction": (
        RNN, "float[4, 2, 2, 2] y", "",
        'y = RNN<hidden_size = 2, direction = "bidirectional", activations = ["Sigmoid", "Relu"]>(x, w, r)', "RNN",
    ),
    "the same activations in both directions": (
        RNN, "float[4, 2, 2, 2] y", "",
        'y = RNN<hidden_size = 2, direction = "bidirectional", activations = ["Relu", "Relu"]>(x, w, r)', None,
    ),
    "Abs of a Concat that is a result": (
        "float[4] x", "float[8] y, float[8] z", "", "n = Neg(x) y = Concat<axis = 0>(x, n) z = Abs(y)", "Abs",
    ),
    "Abs of a Concat that nothing else reads": (
        "float[4] x", "float[8] z", "", "n = Neg(x) y = Concat<axis = 0>(x, n) z = Abs(y)", None,
    ),
    "products of few rows": (
        "float[5, 2] x", "int8[5, 2] y", f"float s = {{0.02}}, int8 z = {{-6}}, {SMALL}", LAYERS, "MatMul",
    ),
    "products of few rows without zero points": (
        "float[5, 2] x", "int8[5, 2] y", f"float s = {{0.02}}, int8 z = {{0}}, {SMALL}", LAYERS, None,
    ),
    "products of more rows": (
        "float[9, 2] x", "int8[9, 2] y", f"float s = {{0.02}}, int8 z = {{-6}}, {SMALL}", LAYERS, None,
    ),
    "a small norm": (
        "float[4, 6] x", "float[4, 6] y", "float k = {0.0001}", "a = Mul(x, k) y = LpNormalization<axis = 1>(a)", "LpNormalization",
    ),
    "channels of averages": (
        "float[3, 5, 7] x", "float[3, 5, 1] y", CHANNELS, "a = GlobalAveragePool(x) y = Add(a, c)", "Add",
    ),
    "channels of a maximum": (
        "float[N, 5, 7] x", "float[N, 5, 1] y", f"{CHANNELS}, int64[1] axes = {{2}}",
        "a = ReduceMax<keepdims = 1>(x, axes) r = Sqrt(a) y = Mul(c, r)", "Mul",
    ),
    "a quantized maximum": (
        PICTURE, "int8[3, 2, 1, 1] y", INT8, "m = GlobalMaxPool(x) y = QuantizeLinear(m, s, z)", "GlobalMaxPool",
    ),
    "a quantized maximum of one axis": (
        PICTURE, "int8[3, 2, 8, 1] y", f"{INT8}, int64[1] axes = {{3}}",
        "m = ReduceMax(x, axes) y = QuantizeLinear(m, s2, z2)", "ReduceMax",
    ),
    "a quantized function of a minimum": (
        PICTURE, "float[2, 3, 1, 1] y", f"{INT8}, int64[2] axes = {{2, 3}}",
        "m = ReduceMin(x, axes) r = Sigmoid(m) t = Transpose<perm = [1, 0, 2, 3]>(r) q = QuantizeLinear(t, s, z) "
        "y = DequantizeLinear(q, s, z)", "ReduceMin",
    ),
    "a maximum of a function of quantized values": (
        PICTURE, "int8[3, 2, 1, 1] y", INT8,
        f"{DEQUANTIZED} e = Sigmoid(d) m = GlobalMaxPool(e) y = QuantizeLinear(m, s, z)", "GlobalMaxPool",
    ),
    "a maximum of quantized values": (
        PICTURE, "int8[3, 2, 1, 1] y", INT8, f"{DEQUANTIZED} m = GlobalMaxPool(d) y = QuantizeLinear(m, s2, z2)", None,
    ),
    "a maximum that is not quantized": (PICTURE, "float[3, 2, 1, 1] y", "", "m = GlobalMaxPool(x) y = Sigmoid(m)", None),
    "a quantized norm": (
        PICTURE, "int8[3, 2, 1, 1] y", f"{INT8}, int64[2] axes = {{2, 3}}",
        "m = ReduceL2(x, axes) y = QuantizeLinear(m, s2, z2)", None,
    ),
    "groups from uint8 to int8": (BYTES, "float[1, 4, 6, 6] y", *grouped(2, 95, "int8", 29), "Conv"),
    "groups from uint8 to int8, with an activation": (
        BYTES, "float[1, 4, 6, 6] y", *grouped(2, 128, "int8", -3, "Relu"), "Conv",
    ),
    "groups to int8, without a zero point": (BYTES, "float[1, 4, 6, 6] y", *grouped(2, 0, "int8", 29), None),
    "groups to int8 without a zero point": (BYTES, "float[1, 4, 6, 6] y", *grouped(2, 95, "int8", 0), None),
    "groups from uint8 to uint8": (BYTES, "float[1, 4, 6, 6] y", *grouped(2, 95, "uint8", 29), None),
    "one group from uint8 to int8": (BYTES, "float[1, 4, 6, 6] y", *grouped(1, 95, "int8", 29), None),
    "each channel from uint8 to int8": (BYTES, "float[1, 4, 6, 6] y", *grouped(4, 95, "int8", 29), None),
    "channels of a window": (
        "float[3, 5, 7] x", "float[3, 5, 1] y", CHANNELS, "a = MaxPool<kernel_shape = [7]>(x) y = Add(a, c)", None,
    ),
    "channels of an average picture": (
        "float[3, 5, 7, 7] x", "float[3, 5, 1, 1] y", "float[1, 5, 1, 1] c = {1, 2, 3, 4, 5}",
        "a = GlobalAveragePool(x) y = Add(a, c)", None,
    ),
}  # fmt: skip


def model_of(case: str) -> tuple[onnx.ModelProto, dict[str, Array]]:
    inputs, outputs, constants, nodes, _ = CASES[case]
    head = f'<ir_version: 10, opset_import: ["" : 21]> g ({inputs}) => ({outputs})'
    model = onnx.parser.parse_model(f"{head} {f'<{constants}>' if constants else ''} {{ {nodes} }}")
    return model, feeds_of(model)


def feeds_of(model: onnx.ModelProto) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    found = {}
    for v in model.graph.input:
        t = v.type.tensor_type
        shape = [d.dim_value or 7 for d in t.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(t.elem_type)
        top = 256 if dtype.itemsize == 1 else 9
        drawn = rng.standard_normal(shape) if dtype.kind == "f" else rng.integers(0, top, shape)
        found[v.name] = drawn.astype(dtype)
    return found


def by_onnxruntime(model: onnx.ModelProto, feeds: dict[str, Array]) -> list[Array]:
    plain = ort.SessionOptions()
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(model.SerializeToString(), plain, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def assert_same(got: Sequence[Array], want: Sequence[Array]) -> None:
    for a, b in zip(got, want, strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        if a.dtype.kind == "f":
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("case", CASES)
def test_the_faulty_operator_is_found_and_no_other(case: str) -> None:
    graph = import_model(model_of(case)[0])
    faulty = CASES[case][4]
    assert [graph.op(i).kind for i in known_faults(graph)] == ([] if faulty is None else [faulty])


@pytest.mark.slow
@pytest.mark.parametrize("case", sweep(CASES, *list(CASES)[::4]))
def test_the_network_is_right(case: str) -> None:
    model, feeds = model_of(case)
    built = build_verbose(model, BuildOptions(target="cpu", threads=1, tactics="openvino"))
    assert len(built.compiled.fallbacks.get("openvino", [])) == (CASES[case][4] is not None)
    assert_same(list(built.engine.run(feeds).values()), by_onnxruntime(model, feeds))


def test_long_long_is_int64_to_openvino() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 21]> g (int64[4] x, uint64[4] u) => (int64[4] y, uint64[4] v) '
        "{ y = Add(x, x) v = Add(u, u) }"
    )
    engine = build_verbose(model, BuildOptions(target="cpu", threads=1, tactics="openvino")).engine
    feeds = {"x": np.arange(4, dtype=np.longlong), "u": np.arange(4, dtype=np.ulonglong)}
    assert {n: a.tolist() for n, a in engine.run(feeds).items()} == {"y": [0, 2, 4, 6], "v": [0, 2, 4, 6]}
