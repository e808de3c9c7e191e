"""With ``row_invariant``, programs of all batch sizes have the same arithmetic, without it they may take the faster one."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support import small_models
from support.arithmetic import arithmetic, program_at
from support.small_models import small_model

SIZES = (1, 3, 8, 64)
ONES = np.ones(32, np.float32)


def images() -> onnx.ModelProto:
    """Two kernel sizes side by side, a depthwise-separable block, a softmax of channels."""
    return small_model(
        """(float[n,32,28,28] x) => (float[n,32,28,28] y) { a = Conv(x, w0) b = Relu(a) c = Conv(b, w1) d = Relu(c)
        e = Conv<pads = [1,1,1,1]>(b, w3) f = Relu(e) g = Concat<axis = 1>(d, f) h = Conv(g, w4) i = Relu(h)
        j = Conv<pads = [1,1,1,1], group = 96>(i, w5) k = Relu(j) l = Conv(k, w6) m = Add(l, x) y = Softmax<axis = 1>(m) }""",
        w0=(16, 32, 1, 1), w1=(32, 16, 1, 1), w3=(32, 16, 3, 3), w4=(96, 64, 1, 1), w5=(96, 1, 3, 3), w6=(32, 96, 1, 1),
    )  # fmt: skip


def norms_of_heads() -> onnx.ModelProto:
    """Norms of the queries and keys of heads. At batch 1, their rows may be contiguous."""
    return small_model(
        """(float[n,6,64] x) => (float[n,6,64] y) <int64[4] split = {0, 6, 2, 32}, int64[3] joined = {0, 6, 64}> {
        q0 = MatMul(x, wq) k0 = MatMul(x, wk) v0 = MatMul(x, wv)
        q1 = Reshape(q0, split) k1 = Reshape(k0, split) v1 = Reshape(v0, split)
        q2 = Transpose<perm = [0,2,1,3]>(q1) k2 = Transpose<perm = [0,2,1,3]>(k1) v = Transpose<perm = [0,2,1,3]>(v1)
        q = LayerNormalization<axis = -1>(q2, s, b) k3 = LayerNormalization<axis = -1>(k2, s, b)
        k = Transpose<perm = [0,1,3,2]>(k3) a = MatMul(q, k) p = Softmax<axis = -1>(a) o = MatMul(p, v)
        t = Transpose<perm = [0,2,1,3]>(o) y = Reshape(t, joined) }""",
        wq=(64, 64), wk=(64, 64), wv=(64, 64), s=ONES, b=0 * ONES,
    )  # fmt: skip


def rotated_heads() -> onnx.ModelProto:
    """An attention of rotated queries and keys (Llama), 12 tokens, and a gated unit."""
    angles = np.outer(np.arange(12), 0.5 ** np.arange(16)).astype(np.float32)
    angles = np.concatenate([angles, angles], 1)
    return small_model(
        """(float[n,12,64] x) => (float[n,12,64] y) <int64[4] split = {0, 12, 2, 32}, int64[3] joined = {0, 12, 64},
        int64[1] zero = {0}, int64[1] half = {16}, int64[1] end = {32}, int64[1] last = {3}, float scale = {0.17}> {
        q0 = MatMul(x, wq) k0 = MatMul(x, wk) v0 = MatMul(x, wv)
        q1 = Reshape(q0, split) k1 = Reshape(k0, split) v1 = Reshape(v0, split)
        q = Transpose<perm = [0,2,1,3]>(q1) k = Transpose<perm = [0,2,1,3]>(k1) v = Transpose<perm = [0,2,1,3]>(v1)
        qa = Slice(q, zero, half, last) qb = Slice(q, half, end, last) qn = Neg(qb) qr = Concat<axis = -1>(qn, qa)
        qc = Mul(q, c) qs = Mul(qr, s) qt = Add(qc, qs)
        ka = Slice(k, zero, half, last) kb = Slice(k, half, end, last) kn = Neg(kb) kr = Concat<axis = -1>(kn, ka)
        kc = Mul(k, c) ks = Mul(kr, s) kt = Add(kc, ks) kk = Transpose<perm = [0,1,3,2]>(kt)
        a = MatMul(qt, kk) b = Mul(a, scale) p = Softmax<axis = -1>(b) o = MatMul(p, v)
        t = Transpose<perm = [0,2,1,3]>(o) r = Reshape(t, joined)
        g = MatMul(r, wg) h = Sigmoid(g) u = MatMul(r, wu) gu = Mul(h, u) y = MatMul(gu, wo) }""",
        wq=(64, 64), wk=(64, 64), wv=(64, 64), wg=(64, 128), wu=(64, 128), wo=(128, 64),
        c=np.cos(angles)[None, None], s=np.sin(angles)[None, None],
    )  # fmt: skip


def recurrent() -> onnx.ModelProto:
    """A GRU. Its batch is axis 1."""
    return small_model(
        """(float[6,n,8] x) => (float[6,1,n,16] y, float[1,n,16] h) { y, h = GRU<hidden_size = 16>(x, w, r, b) }""",
        w=(1, 48, 8), r=(1, 48, 16), b=np.full((1, 96), 0.1, np.float32),
    )  # fmt: skip


def quantized() -> onnx.ModelProto:
    """A convolution of 8 bits, and a group norm with an addition after it."""
    rng = np.random.default_rng(5)
    return small_model(
        """(float[n,16,8,8] x) => (float[n,16,8,8] y)
        <float s = {0.03}, int8 z = {0}, float sw = {0.002}, float so = {0.05}, int64[3] groups = {0, 4, -1}> {
        xq = QuantizeLinear(x, s, z) xd = DequantizeLinear(xq, s, z) wd = DequantizeLinear(w, sw, z)
        c = Conv<pads = [1,1,1,1]>(xd, wd) cq = QuantizeLinear(c, so, z) cd = DequantizeLinear(cq, so, z) r = Relu(cd)
        g = InstanceNormalization(r, u, v) y = Add(g, x) }""",
        w=rng.integers(-127, 128, (16, 16, 3, 3)).astype(np.int8), u=ONES[:16], v=0 * ONES[:16],
    )  # fmt: skip


def wide() -> onnx.ModelProto:
    """Products of rows whose weights may have 4 bits."""
    return small_model(
        "(float[n,256] x) => (float[n,256] y) { a = MatMul(x, w) b = Relu(a) y = MatMul(b, v) }",
        w=(256, 512),
        v=(512, 256),
    )


def experts() -> onnx.ModelProto:
    """Rows that select two of eight matrices each."""
    return small_model(
        """(float[n,64] x) => (float[n,2,64] y) <int64[1] two = {2}, int64[1] one = {1}, int64[1] flat = {-1}, int64[1] last = {2},
        int64[3] repeat = {1, 2, 1}, int64[3] column = {-1, 64, 1}, int64[3] pairs = {-1, 2, 64}> {
        r = MatMul(x, router) v, i = TopK<axis = 1>(r, two) f = Reshape(i, flat) m = Gather(w, f)
        a = Unsqueeze(x, one) b = Expand(a, repeat) c = Reshape(b, column) d = MatMul(m, c) y = Reshape(d, pairs) }""",
        router=(64, 8), w=(8, 64, 64),
    )  # fmt: skip


NETWORKS = {
    "mlp": (small_models.mlp("n"), "fp16 bf16 fp32 tf32"),
    "attention": (small_models.attention("n"), "fp16 fp32 tf32"),
    "images": (images(), "fp16 fp32"),
    "norms of heads": (norms_of_heads(), "fp16 fp32"),
    "rotated heads": (rotated_heads(), "fp16"),
    "recurrent": (recurrent(), "fp16 fp32"),
    "quantized": (quantized(), "fp16"),
    "weights of 4 bits": (wide(), "w4 w4a8"),
    "experts": (experts(), "fp16 fp32"),
}
CASES = [(name, precision) for name, (_, precisions) in NETWORKS.items() for precision in precisions.split()]


def programs(name: str, precision: str, row_invariant: bool) -> list[dict[str, int]]:
    """The arithmetic of a network at each batch size."""
    model = NETWORKS[name][0]
    found = []
    for size in SIZES:
        shapes = {i.name: [d.dim_value or size for d in i.type.tensor_type.shape.dim] for i in model.graph.input}
        found.append(arithmetic(program_at(model, shapes, precision=precision, row_invariant=row_invariant)))
    return found


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_every_batch_size_has_one_arithmetic(name: str, precision: str) -> None:
    first, *others = programs(name, precision, True)
    assert not any(step.startswith("host") for step in first)
    for size, other in zip(SIZES[1:], others, strict=True):
        assert first == other, (size, sorted((first - other) + (other - first)))


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("mlp", "fp16"),
        ("images", "fp16"),
        ("rotated heads", "fp16"),
        ("weights of 4 bits", "w4"),
        ("experts", "fp16"),
    ],
)
def test_without_the_promise_the_faster_one_is_taken(name: str, precision: str) -> None:
    first, *others = programs(name, precision, False)
    assert any(other != first for other in others)


def test_calibration_data_decide_what_stays_fp32() -> None:
    """Generated inputs of more rows have larger values: without data, more operators of a large batch stay fp32."""
    rng = np.random.default_rng(0)
    model = small_model(
        """(float[n,64] x) => (float[n,64] y) { a = MatMul(x, w) b = Mul(a, a) c = Exp(a) d = Mul(b, c) e = MatMul(d, v)
        y = Tanh(e) }""",
        w=(rng.standard_normal((64, 64)) / 4).astype(np.float32), v=1e-5 * np.eye(64, dtype=np.float32),
    )  # fmt: skip
    rows = rng.standard_normal((4, 64)).astype(np.float32)

    def made(size: int, calibrated: bool) -> dict[str, int]:
        data = [{"x": np.tile(rows, (size // len(rows), 1))}] if calibrated else None
        options = {"precision": "fp16", "row_invariant": True, "calib": data, "calibrator": "minmax"}
        return arithmetic(program_at(model, {"x": [size, 64]}, **options))

    assert made(4, True) == made(1024, True)
    assert made(4, False) != made(1024, False)
