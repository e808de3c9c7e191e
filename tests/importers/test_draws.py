"""Random operators: refused without a seed. With a seed, they give the same well distributed numbers in every run and on every
target."""

from __future__ import annotations

import hashlib
from itertools import combinations
from math import erf
from typing import Any

import numpy as np
import onnx
import pytest
from support import draws
from support.draws import feed, graph, model

import optdnn
from optdnn.errors import ModelError, UnsupportedError, UsageError
from optdnn.importers.draws import with_draws
from optdnn.importers.model import open_model
from optdnn.importers.onnx import import_model
from optdnn.ir.evaluate import evaluate
from optdnn.types import Array

NORMAL = "g () => (float[200000] y) { y = RandomNormal<shape = [200000]>() }"
UNIFORM = NORMAL.replace("Normal", "Uniform")
LOOP = """g (int64 n, bool c, float[5] x) => (float[5] y) {
    y = Loop (n, c, x) <body = b (int64 i, bool d, float[5] v) => (bool e, float[5] w) {
        e = Identity(d)  r = RandomNormalLike(v)  w = Add(v, r) }> }"""
FUNCTION = """<domain: "f", opset_import: ["" : 17]> noisy <high: float = 2.0> (x) => (y) {
    z = RandomUniformLike<high: float = @high>(x)  y = Add(x, z) }"""
CALLS = "g (float[300] x) => (float[300] a, float[300] b) { [one] a = f.noisy(x)  [two] b = f.noisy<high = 9.0>(x) }"


def drawn(text: str, seed: int = 3, feeds: dict[str, Any] | None = None, **options: Any) -> dict[str, Array]:
    return evaluate(graph(text, seed, **options), feeds or {})


# ---------------------------------------------------------------- refusals


def test_without_a_seed_they_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"with --random-seed N .* takes it, except in loops") as error:
        optdnn.build(model(), target="reference")
    kinds = {"RandomNormalLike", "RandomUniformLike", "RandomNormal", "RandomUniform", "Bernoulli", "Multinomial"}
    assert {node.op_type for node in error.value.nodes} == kinds


def test_in_loops_they_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"RandomNormalLike .*: it draws random numbers.* except in loops"):
        optdnn.build(model(LOOP), target="reference", random_seed=1)
    text = LOOP.replace("r = RandomNormalLike(v)", "r = f.noisy(v)")
    called = with_draws(model(text, functions=FUNCTION, more_opsets=', "f" : 1'), 1)
    with pytest.raises(UnsupportedError, match=r"RandomUniformLike .*: it draws random numbers"):
        import_model(called)


DROPOUT = """g (float[200000] x, bool t) => (float[200000] y, bool[200000] m) {
    r = Constant<value = float {0.2}>()  y, m = Dropout(x, r, t) }"""


def test_dropout_in_training_mode() -> None:
    """Monte Carlo dropout: a share of the elements is zero, the others are scaled. The mode may be an input."""
    x = np.linspace(1, 2, 200000, dtype=np.float32)
    y, m = drawn(DROPOUT, feeds={"x": x, "t": np.array(True)}).values()
    assert abs(m.mean() - 0.8) < 0.005
    np.testing.assert_array_equal(y[~m], 0)
    np.testing.assert_allclose(y[m], x[m] / 0.8, rtol=1e-6)
    y, m = drawn(DROPOUT, feeds={"x": x, "t": np.array(False)}).values()
    np.testing.assert_array_equal(y, x)
    assert m.all()


def test_dropout_of_half_the_elements_is_the_default() -> None:
    text = "g (float16[1000] x) => (float16[1000] y) { t = Constant<value = bool {1}>()  y = Dropout(x, , t) }"
    (y,) = drawn(text, feeds={"x": np.ones(1000, np.float16)}).values()
    assert set(np.unique(y)) == {0, 2}
    assert 400 < (y == 0).sum() < 600


def test_dropout_in_training_mode_is_refused_without_a_seed_and_in_loops() -> None:
    because = r"training_mode must be a constant false.*; a build with --random-seed N .* except in loops"
    with pytest.raises(UnsupportedError, match=because) as caught:
        optdnn.build(model(DROPOUT), target="reference")
    assert "--value NAME=... or values={...} fixes the input that decides it" in str(caught.value)
    optdnn.build(model(DROPOUT), target="reference", values={"t": np.array(False)})
    with pytest.raises(UnsupportedError, match=r"must be a constant false; a build"):
        optdnn.build(model(DROPOUT), target="reference", values={"t": np.array(True)})
    text = LOOP.replace("r = RandomNormalLike(v)", "r = Dropout(v, , d)")
    with pytest.raises(UnsupportedError, match=because):
        optdnn.build(model(text), target="reference", random_seed=1)


@pytest.mark.parametrize(
    ("text", "opset", "message"),
    [
        ("y = RandomNormal()", 17, r"y_0|RandomNormal_0 \(RandomNormal\): lacks its attribute 'shape'"),
        ("y = RandomNormal<shape = [2], other = 3>()", 17, "unknown attribute 'other'"),
        ("y = RandomNormal<shape = [2, -1]>()", 17, "negative dimension"),
        ("y = RandomNormal<shape = [4294967296, 4294967296]>()", 17, "too many elements"),
        ("y = RandomUniform<shape = [2], dtype = 7>()", 17, "'dtype' is 7, which is not one of FLOAT, DOUBLE"),
        ("y = Multinomial<dtype = 1>(x)", 17, "'dtype' is 1, which is not one of INT32, INT64"),
        ("y = RandomNormalLike()", 17, "has 0 operands, needs 1"),
    ],
)
def test_nodes_that_break_their_schema(text: str, opset: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        with_draws(model(f"g (float[2, 3] x) => (float[N] y) {{ {text} }}", opset), 1)


def test_operators_of_a_later_opset() -> None:
    text = "g (float[2, 3] x) => (float[2, 3] y) { y = Bernoulli(x) }"
    with pytest.raises(UnsupportedError, match=r"Bernoulli .*: the operator came with opset 15"):
        import_model(with_draws(model(text, 13), 1))


def test_functions_that_call_themselves() -> None:
    text = "g (float[2] x) => (float[2] y) { y = f.again(x) }"
    again = (
        '<domain: "f", opset_import: ["" : 17, "f" : 1]> again (x) => (y) { a = f.again(x)  y = RandomNormalLike(a) }'
    )
    with pytest.raises(ModelError, match="recursion"):
        with_draws(model(text, functions=again, more_opsets=', "f" : 1'), 1)


def test_attributes_that_are_not_supported() -> None:
    """The import names the node instead of making the draws."""
    made = model(CALLS, functions=FUNCTION, more_opsets=', "f" : 1')
    odd = onnx.helper.make_attribute("high", [onnx.helper.make_tensor("t", 1, [1], [1.0])])
    made.graph.node[0].attribute.append(odd)
    with pytest.raises(UnsupportedError, match="attribute 'high' is of a type that is not supported"):
        import_model(with_draws(made, 1))


def test_long_chains_of_functions() -> None:
    header = '<domain: "f", opset_import: ["" : 17, "f" : 1]>'
    chain = "\n".join(f"{header} f{i} (x) => (y) {{ y = f.f{i + 1}(x) }}" for i in range(3000))
    text = "g (float[2] x) => (float[2] y) { y = f.f0(x) }"
    drawn_last = model(
        text, functions=f"{chain}\n{header} f3000 (x) => (y) {{ y = RandomNormalLike(x) }}", more_opsets=', "f" : 1'
    )
    with pytest.raises(ModelError, match="functions call one another more than"):
        with_draws(drawn_last, 1)


@pytest.mark.parametrize(
    ("seed", "message"), [(-1, "random_seed must be 0 or more, not -1"), ("3", "random_seed must be an integer")]
)
def test_seeds_that_are_none(seed: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        optdnn.build(model(), target="reference", random_seed=seed)


# ---------------------------------------------------------------- the same numbers


@pytest.mark.slow
def test_targets_draw_the_same_bits() -> None:
    x = feed()
    made: dict[str, Any] = {}
    for target, shapes in (
        ("reference", None), ("cpu", None), ("cpu", {"x": (3, 7000)}), ("simulate", {"x": (3, 7000)}),
        ("simulate", {"x": (3, optdnn.DimRange(4, 5000, 9000))}),
    ):  # fmt: skip
        options = {} if target != "cpu" else {"tactics": "onnxruntime", "threads": 1}
        engine = optdnn.build(model(), target=target, shapes=shapes, random_seed=3, **options)
        assert engine.meta["options"]["random_seed"] == 3
        got = engine.run(x)
        for name, want in made.items():
            np.testing.assert_array_equal(got[name], want, err_msg=f"{name} on {target}")
        for name, again in engine.run(x).items():
            np.testing.assert_array_equal(again, got[name])
        made = made or got


def test_precision_does_not_change_draws() -> None:
    """Draws are float64 until the end. Only results computed from them are rounded."""
    text = "g (float[3, 7000] x) => (float[3, 7000] n) { n = RandomNormalLike(x) }"
    whole = optdnn.build(model(text), target="simulate", random_seed=3).run(feed())["n"]
    half = optdnn.build(model(text), target="simulate", random_seed=3, precision="fp16").run(feed())["n"]
    np.testing.assert_array_equal(half, whole.astype(np.float16).astype(np.float32))


def test_on_a_gpu_nothing_runs_on_the_host() -> None:
    engine = optdnn.build(model(), target="simulate", shapes={"x": (3, 7000)}, random_seed=3, strict=True)
    assert {s.executor for s in engine.program.steps} == {"cuda"}


def test_dynamic_sizes() -> None:
    text = "g (float[N, 3, M] x) => (float[N, 3, M] y) { y = RandomNormalLike(x) }"
    whole = drawn(text, feeds={"x": np.zeros((9, 3, 700), np.float32)})["y"]
    for rows in (0, 1, 2, 9):  # the draws of a row depend on its position, not on the batch
        part = drawn(text, feeds={"x": np.zeros((rows, 3, 700), np.float32)})["y"]
        np.testing.assert_array_equal(part, whole[:rows])
    depends = """g (float[N] x) => (float[M] y) { i = NonZero(x)  f = Cast<to = 1>(i)  a = Constant<value_ints = [0]>()
        s = Squeeze(f, a)  y = RandomNormalLike(s) }"""
    x = np.zeros(4000, np.float32)
    x[::2] = 1
    engine = optdnn.build(model(depends), target="cpu", threads=1, random_seed=3)
    np.testing.assert_array_equal(engine.run({"x": x})["y"], drawn(depends, feeds={"x": x})["y"])
    assert engine.run({"x": x})["y"].shape == (2000,)


def test_scalars_and_empty_tensors() -> None:
    made = drawn(
        "g () => (float y, float[0, 3] z) { y = RandomNormal<shape : ints = []>()  z = RandomNormal<shape = [0, 3]>() }"
    )
    assert (made["y"].shape, made["z"].shape) == ((), (0, 3))


def test_nodes_and_seeds_draw_apart() -> None:
    def one(name: str, attribute: str = "", seed: int = 3, before: str = "") -> Array:
        text = f"g () => (float[3000] {name}) {{ {before} {name} = RandomNormal<shape = [3000]{attribute}>() }}"
        return drawn(text, seed)[name]

    found = [
        one("y"),
        one("z"),
        one("y", seed=4),
        one("y", ", seed = 1.0"),
        one("y", ", seed = 2.0"),
        one("z", ", seed = 1.0"),
    ]
    for a, b in combinations(found, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4.5 / np.sqrt(3000)
    np.testing.assert_array_equal(one("y", before="q = RandomNormal<shape = [9]>() w = Neg(q)"), found[0])


def test_calls_of_a_function_draw_apart() -> None:
    made = drawn(CALLS, functions=FUNCTION, more_opsets=', "f" : 1', feeds={"x": np.zeros(300, np.float32)})
    a, b = made["a"] / 2, made["b"] / 9
    assert 0.9 < a.max() < 1
    assert 0.9 < b.max() < 1
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.25
    functions = (
        FUNCTION
        + """\n<domain: "f", opset_import: ["" : 17, "f" : 1]> twice (x) => (y) { z = f.noisy(x)  y = f.noisy(z) }"""
    )
    nested = "g (float[300] x) => (float[300] a, float[300] b) { a = f.twice(x)  b = f.twice(x) }"
    made = drawn(nested, functions=functions, more_opsets=', "f" : 1', feeds={"x": np.zeros(300, np.float32)})
    assert 2 < made["a"].max() < 4
    assert abs(np.corrcoef(made["a"], made["b"])[0, 1]) < 0.25


def test_branches() -> None:
    text = """g (bool c) => (float[400] y) { y = If(c) <
        then_branch = t () => (float[400] p) { p = RandomNormal<shape = [400], mean = 9.0>() },
        else_branch = e () => (float[400] q) { q = RandomNormal<shape = [400]>() }> }"""
    assert drawn(text, feeds={"c": np.array(True)})["y"].mean() > 8.5
    assert abs(drawn(text, feeds={"c": np.array(False)})["y"].mean()) < 0.3


def test_a_model_without_them_stays_as_it_is() -> None:
    opened = open_model(model("g (float[2] x) => (float[2] y) { y = Neg(x) }"))
    assert with_draws(opened, 3) is opened
    once = with_draws(model(), 3)
    assert with_draws(once, 4) is once


def test_operators_are_named_after_their_node() -> None:
    text = "g (float[5000] x) => (float[5000] y) { [noise] n = RandomNormalLike(x)  [sum] y = Add(x, n) }"
    made = graph(text)
    names = {name for op in made.ops() for name in op.src}
    assert {name.partition("/")[0] for name in names} == {"noise", "sum"}
    assert [made.op(i).outputs[0].name for i in made.outputs] == ["y"]


# ---------------------------------------------------------------- distributions


def uniformity(u: Array) -> float:
    """The Kolmogorov-Smirnov statistic times the root of the count. One draw in a thousand exceeds 1.95."""
    ranks = (np.arange(u.size) + 0.5) / u.size
    return float(np.abs(np.sort(u) - ranks).max() * np.sqrt(u.size))


def dependence(x: Array, lag: int) -> float:
    """The correlation of elements at distance ``lag``, in standard deviations."""
    return abs(float(np.corrcoef(x[lag:], x[:-lag])[0, 1])) * np.sqrt(x.size - lag)


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_uniform_numbers(seed: int) -> None:
    u = drawn(UNIFORM, seed)["y"].astype(np.float64)
    assert u.min() >= 0
    assert u.max() < 1
    assert uniformity(u) < 1.95
    assert np.array_equal(u * 2**24, np.floor(u * 2**24))
    for lag in (1, 2, 3, 1024):
        assert dependence(u, lag) < 4
        cells = np.histogram2d(u[lag:], u[:-lag], 32, [[0, 1], [0, 1]])[0]
        wanted = (u.size - lag) / 1024
        assert ((cells - wanted) ** 2 / wanted).sum() < 1023 + 4.5 * np.sqrt(2 * 1023)


@pytest.mark.parametrize("seed", [0, 1, 2**40])
def test_normal_numbers(seed: int) -> None:
    z = drawn(NORMAL, seed)["y"].astype(np.float64)
    root = np.sqrt(z.size)
    skewness, excess = (z**3).mean(), (z**4).mean() - 3
    moments = (z.mean() * root, (z.var() - 1) * root / 2**0.5, skewness * root / 15**0.5, excess * root / 96**0.5)
    assert np.abs(moments).max() < 4
    assert uniformity(np.array([0.5 + 0.5 * erf(v / 2**0.5) for v in z[:20000]])) < 1.95
    assert 4 < np.abs(z).max() < 7
    assert max(dependence(z, lag) for lag in (1, 2, 3, 1024)) < 4
    assert max(dependence(z**2, lag) for lag in (1, 2, 3, 1024)) < 4


def test_scales_and_ranges() -> None:
    made = drawn(
        "g () => (float[90000] n, float[90000] u) { n = RandomNormal<shape = [90000], mean = 2.0, scale = 3.0>() "
        "u = RandomUniform<shape = [90000], low = -1.3, high = 4.1>() }"
    )
    assert made["n"].mean() == pytest.approx(2, abs=0.05)
    assert made["n"].std() == pytest.approx(3, rel=0.02)
    assert (made["u"].min(), made["u"].max()) == (pytest.approx(-1.3, abs=1e-3), pytest.approx(4.1, abs=1e-3))


def test_bernoulli_takes_each_elements_probability() -> None:
    text = "g (float[4, 50000] p) => (float[4, 50000] y, bool[4, 50000] z) { y = Bernoulli(p)  z = Bernoulli<dtype = 9>(p) }"
    p = np.repeat(np.array([[0], [0.3], [0.9], [1]], np.float32), 50000, axis=1)
    made = drawn(text, feeds={"p": p})
    for name in "yz":
        np.testing.assert_allclose(made[name].mean(axis=1), [0, 0.3, 0.9, 1], atol=0.01)
        assert made[name][0].max() == 0
        assert made[name][3].min() == 1
    assert (made["y"].dtype, made["z"].dtype) == (np.float32, np.bool_)


def test_multinomial_takes_logits() -> None:
    text = "g (float[3, 5] x) => (int64[3, 40000] y) { y = Multinomial<sample_size = 40000, dtype = 7>(x) }"
    x = np.array([[0, 1, 2, -1, -np.inf], [5, 5, 5, 5, 5], [-np.inf, -3, -np.inf, -np.inf, -np.inf]], np.float32)
    y = drawn(text, feeds={"x": x})["y"]
    shares = np.stack([np.bincount(row, minlength=5) / 40000 for row in y])
    exponentials = np.exp(x - x.max(axis=1, keepdims=True))
    np.testing.assert_allclose(shares, exponentials / exponentials.sum(axis=1, keepdims=True), atol=0.012)
    assert dependence(y[1].astype(float), 1) < 4


@pytest.mark.parametrize(("number", "dtype"), [(1, "float32"), (10, "float16"), (11, "float64"), (16, "bfloat16")])
def test_element_types(number: int, dtype: str) -> None:
    text = f"""g (float[6000] x) => (T[6000] n, T[6000] u, T[6000] l) {{
        n = RandomNormal<shape = [6000], dtype = {number}>()  u = RandomUniformLike<dtype = {number}>(x)
        y = Cast<to = {number}>(x)  l = RandomNormalLike(y) }}"""
    text = text.replace("T[", {"float32": "float", "float64": "double"}.get(dtype, dtype) + "[")
    made = drawn(text, feeds={"x": np.zeros(6000, np.float32)}, opset=22)
    assert {str(a.dtype) for a in made.values()} == {dtype}
    assert made["n"].astype(float).std() == pytest.approx(1, abs=0.05)
    assert made["l"].astype(float).std() == pytest.approx(1, abs=0.05)
    assert made["u"].astype(float).mean() == pytest.approx(0.5, abs=0.02)


# ---------------------------------------------------------------- builds


def test_large_draws_are_no_constants() -> None:
    for elements, folded in ((16000, True), (17000, False)):
        text = f"g (float[{elements}] x) => (float[{elements}] y) {{ n = RandomNormalLike(x)  y = Add(x, n) }}"
        program = optdnn.build(model(text), target="reference", random_seed=3).program
        assert (sum(b.nbytes for b in program.blobs) >= 4 * elements) is folded


def test_an_engine_takes_new_weights() -> None:
    text = "g (float[5000] x) => (float[5000] y) <float[1] w = {3.0}> { n = RandomNormalLike(x)  y = Mul(n, w) }"
    engine = optdnn.build(model(text), target="cpu", threads=1, random_seed=3, refit=True)
    x = {"x": np.zeros(5000, np.float32)}
    before = engine.run(x)["y"]
    engine.refit({"w": np.array([6], np.float32)})
    np.testing.assert_array_equal(engine.run(x)["y"], 2 * before)


def test_verify_knows_the_draws(tmp_path: Any) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(model(draws.FAMILY), path)
    engine = optdnn.build(path, target="reference", random_seed=3)
    found = {c.name: c.status for c in optdnn.verify(engine, path).checks}
    assert found["model"] == "passed"


def test_a_batch_is_not_split_across_draws() -> None:
    """Otherwise the other devices would repeat the draws of the first."""
    text = "g (float[4, 6000] x) => (float[4, 6000] y) { n = RandomNormalLike(x)  y = Mul(x, n) }"
    with pytest.raises(UnsupportedError, match="cuts the axis that would be split"):
        optdnn.build(model(text), target="reference", random_seed=3, devices=2, split="batch")


def test_the_numbers_of_a_seed_are_these() -> None:
    """The numbers are the same in every version, so an engine that is built again repeats its draws."""

    def mixed(x: Array) -> Array:
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))

    digest = hashlib.sha256(repr((3, None, "y")).encode()).digest()
    keys = np.frombuffer(digest, "<u4")
    words = mixed(mixed(np.arange(5000, dtype=np.uint32) ^ keys[0]) ^ keys[1])
    text = "g () => (float[5000] y) { y = RandomUniform<shape = [5000]>() }"
    np.testing.assert_array_equal(drawn(text)["y"], ((words >> np.uint32(8)) * 2.0**-24).astype(np.float32))
    radius = np.sqrt(-2 * np.log((words + 0.5) * 2.0**-32))
    normal = radius * np.cos(mixed(words ^ keys[2]) * (2 * np.pi * 2.0**-32))
    np.testing.assert_allclose(drawn(text.replace("Uniform", "Normal"))["y"], normal, rtol=1e-6)
