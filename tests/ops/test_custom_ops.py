"""Operators of the user: on every target, in engine files, and refused if they are missing or different."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest

import optdnn
from optdnn import CudaKernel, CudaLaunch, custom, custom_op
from optdnn.errors import EngineError, RunError, ShapeError, UnsupportedError, UsageError
from optdnn.importers.onnx import import_model
from optdnn.runtime.cuda.device import gpu_count
from optdnn.types import TensorType

SOURCE = """
struct Params { const X0* x; Y0* y; u32 count; float lambd, bias; };

extern "C" __global__ void shrink(const __grid_constant__ Params p) {
    launch_dependents();
    wait_for_predecessor();
    const u32 i = blockIdx.x * 256 + threadIdx.x;
    if (i >= p.count) return;
    const float v = widen(p.x[i]);
    p.y[i] = v < -p.lambd ? v + p.bias : v > p.lambd ? v - p.bias : 0.0f;
}
"""


def infer(types: Any, attributes: Any) -> TensorType:
    return types[0]


def reference(x: Any, lambd: float, bias: float) -> Any:
    return np.where(x < -lambd, x + bias, np.where(x > lambd, x - bias, np.float32(0)))


def launch(inputs: Any, outputs: Any, attributes: Any) -> CudaLaunch:
    count = int(np.prod(inputs[0].static_shape))
    scalars = (("u32", count), ("f32", attributes["lambd"]), ("f32", attributes["bias"]))
    return CudaLaunch((-(-count // 256), 1, 1), 256, scalars)


def shrink(**more: Any) -> custom.CustomOp:
    given: dict[str, Any] = {
        "infer": infer,
        "reference": reference,
        "attributes": {"lambd": 0.5, "bias": 0.0},
        "cuda": CudaKernel(SOURCE, "shrink", launch),
    }
    return custom_op("com.example.Shrink", **{**given, **more})


MODEL = onnx.parser.parse_model(
    """<ir_version: 8, opset_import: ["": 17, "com.example": 1]>
    g (float[n, 8] x) => (float[n, 8] y)
    { a = Sigmoid(x)  b = Neg(a)  c = com.example.Shrink<lambd = 0.6, bias = 0.125>(b)  y = Abs(c) }"""
)
X = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)


def expected(x: Any) -> Any:
    return np.abs(reference(-1 / (1 + np.exp(-x)), 0.6, 0.125))


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", ["reference", "cpu", "simulate", pytest.param("cuda:sm_90a", marks=pytest.mark.nvrtc)]
)
def test_every_target_runs_it(target: str, tmp_path: Path) -> None:
    op = shrink()
    shapes = {"x": (4, 8)} if target != "reference" else None
    engine = optdnn.build(MODEL, target=target, custom_ops=[op], shapes=shapes)
    assert engine.program.requires[-1] == f"custom:com.example.Shrink@{op.digest}"
    engine.save(tmp_path / "e")
    simulate = target.startswith("cuda") and gpu_count() == 0
    loaded = optdnn.load(tmp_path / "e", custom_ops=[op], simulate=simulate)
    np.testing.assert_allclose(loaded.run({"x": X})["y"], expected(X), rtol=1e-5, atol=1e-6)
    if target in ("simulate", "cuda:sm_90a"):
        assert not engine.meta["host"]["operators"]  # its own kernel runs it
        assert (
            sum("struct Params { const X0* x;" in text for k in engine.program.kernels for text in k.generated.values())
            == 1
        )
    with pytest.raises(EngineError, match=rf"com.example.Shrink \(digest {op.digest}\) is not given\n.*custom_ops="):
        optdnn.load(tmp_path / "e", simulate=simulate)
    other = shrink(version="2")
    with pytest.raises(EngineError, match=rf"given with digest {other.digest}, the engine was built with {op.digest}"):
        optdnn.load(tmp_path / "e", custom_ops=[other], simulate=simulate)


def test_without_a_kernel_the_cpu_runs_it() -> None:
    op = shrink(cuda=None)
    engine = optdnn.build(MODEL, target="simulate", custom_ops=[op], shapes={"x": (4, 8)})
    (reported,) = engine.meta["host"]["operators"]
    assert reported["kind"] == "Custom"
    assert "it is declared without a CUDA kernel" in reported["why"]
    np.testing.assert_allclose(engine.run({"x": X})["y"], expected(X), rtol=1e-5, atol=1e-6)
    picky = shrink(cuda=CudaKernel(SOURCE, "shrink", launch, refuse=lambda i, o, a: "not on Fridays"))
    engine = optdnn.build(MODEL, target="simulate", custom_ops=[picky], shapes={"x": (4, 8)})
    assert "not on Fridays" in engine.meta["host"]["operators"][0]["why"]


def test_ranges_of_shapes(tmp_path: Path) -> None:
    op = shrink()
    optdnn.build(MODEL, target="simulate", custom_ops=[op], shapes={"x": "1..4..6x8"}).save(tmp_path / "e")
    engine = optdnn.load(tmp_path / "e", custom_ops=[op])
    for n in (4, 6, 2):
        x = np.resize(X, (n, 8))
        np.testing.assert_allclose(engine.run({"x": x})["y"], expected(x), rtol=1e-5, atol=1e-6)


def test_half_precision() -> None:
    engine = optdnn.build(MODEL, target="simulate", precision="fp16", custom_ops=[shrink()], shapes={"x": (4, 8)})
    np.testing.assert_allclose(engine.run({"x": X})["y"], expected(X), rtol=0, atol=2e-3)


def test_inside_of_a_body(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17, "com.example": 1]>
        g (bool c, float[2, 4] x) => (float[2, 4] y) {
            y = If(c) <then_branch = t () => (float[2, 4] a) { a = com.example.Shrink(x) },
                       else_branch = f () => (float[2, 4] b) { b = Neg(x) }>
        }"""
    )
    op = shrink()
    optdnn.build(model, target="reference", custom_ops=[op]).save(tmp_path / "e")
    with pytest.raises(EngineError, match=r"com\.example\.Shrink"):
        optdnn.load(tmp_path / "e")
    x = np.resize(X, (2, 4))
    y = optdnn.load(tmp_path / "e", custom_ops=[op]).run({"c": np.array(True), "x": x})["y"]
    np.testing.assert_array_equal(y, reference(x, 0.5, 0.0))


def test_the_digest_distinguishes_declarations() -> None:
    def other(x: Any, lambd: float, bias: float) -> Any:
        return x

    ops = [shrink(), shrink(version="2"), shrink(reference=other), shrink(attributes={"lambd": 0.5, "bias": 1.0}),
           shrink(cuda=None), shrink(cuda=CudaKernel(SOURCE + "\n", "shrink", launch))]  # fmt: skip
    assert len({op.digest for op in ops}) == len(ops)
    assert shrink() is ops[0]  # equal declarations are one operator
    assert (
        custom_op("a.B", infer=infer, reference=np.negative).digest
        != custom_op("a.B", infer=infer, reference=np.abs).digest
    )


def test_an_unknown_operator_is_named() -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"holds 1 thing that .*\n.*com.example.Shrink.*the custom operator is unknown\n  hint: declare .*custom_op",
    ):
        import_model(MODEL)


@pytest.mark.parametrize(
    ("change", "because"),
    [
        ({"name": "Shrink"}, "is called DOMAIN.TYPE"),
        ({"reference": None}, "must be functions"),
        ({"attributes": {"w": np.zeros(3)}}, "attribute w=.* is not a number, text or list"),
    ],
)
def test_declarations_that_are_refused(change: dict[str, Any], because: str) -> None:
    given: dict[str, Any] = {"name": "a.B", "infer": infer, "reference": reference, **change}
    with pytest.raises(UsageError, match=because):
        custom_op(given.pop("name"), **given)


def test_options_that_are_refused() -> None:
    with pytest.raises(UsageError, match="must be a list"):
        optdnn.build(MODEL, custom_ops=shrink())
    with pytest.raises(UsageError, match="holds a str"):
        optdnn.build(MODEL, custom_ops=["com.example.Shrink"])
    with pytest.raises(UsageError, match=r"two operators called com\.example\.Shrink"):
        optdnn.build(MODEL, custom_ops=[shrink(), shrink(version="2")])
    taken = custom_op("com.microsoft.Gelu", infer=infer, reference=np.negative)
    with pytest.raises(UsageError, match="has a name that is taken"):
        optdnn.build(MODEL, custom_ops=[taken])


def test_faults_in_the_users_code_are_reported() -> None:
    def broken(*given: Any, **more: Any) -> Any:
        raise KeyError("oops")

    with pytest.raises(ShapeError, match=r"infer of the custom operator com\.example\.Shrink failed: KeyError"):
        import_model(MODEL, custom_ops=[shrink(infer=broken)])
    with pytest.raises(ShapeError, match="must give TensorTypes"):
        import_model(MODEL, custom_ops=[shrink(infer=lambda t, a: 5)])
    engine = optdnn.build(MODEL, target="reference", custom_ops=[shrink(reference=broken)])
    with pytest.raises(RunError, match=r"Shrink.* failed: KeyError"):
        engine.run({"x": X})
    engine = optdnn.build(MODEL, target="reference", custom_ops=[shrink(reference=lambda x, **more: x[:1])])
    with pytest.raises(RunError, match=r"it should be .*\n  hint: the custom operator's infer and reference disagree"):
        engine.run({"x": X})
    with pytest.raises(
        UnsupportedError, match=r"reference of the custom operator com\.example\.Shrink failed: KeyError"
    ):
        optdnn.build(MODEL, target="cpu", custom_ops=[shrink(reference=broken)], shapes={"x": (4, 8)})
    with pytest.raises(UnsupportedError, match="has no attribute 'bias'"):
        import_model(MODEL, custom_ops=[shrink(attributes={"lambd": 1.0})])
    strange = shrink(cuda=CudaKernel(SOURCE, "shrink", lambda i, o, a: None))  # type: ignore[arg-type, return-value]
    engine = optdnn.build(MODEL, target="simulate", custom_ops=[strange], shapes={"x": (4, 8)})
    assert "not a CudaLaunch" in engine.meta["host"]["operators"][0]["why"]


@pytest.mark.nvrtc
def test_a_source_that_does_not_compile() -> None:
    broken = shrink(cuda=CudaKernel(SOURCE.replace("widen(", "widem("), "shrink", launch))
    with pytest.raises(
        UsageError, match=r"custom operator com\.example\.Shrink: general\.cu does not compile for sm_90a[\s\S]*widem"
    ):
        optdnn.build(MODEL, target="cuda:sm_90a", custom_ops=[broken], shapes={"x": (4, 8)})


def test_custom_ops_are_a_list(tmp_path: Path) -> None:
    optdnn.build(MODEL, target="reference", custom_ops=[shrink()]).save(tmp_path / "e")
    for given in (shrink(), None):
        with pytest.raises(UsageError, match=r"custom_ops must be a list of operators from optdnn\.custom_op"):
            optdnn.load(tmp_path / "e", custom_ops=given)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="custom_ops must be a list"):
            optdnn.build(MODEL, target="reference", custom_ops=given)


def test_an_operator_that_nobody_holds_cannot_run() -> None:
    with pytest.raises(RunError, match=r"custom operator a.B \(digest 00\) is not available"):
        custom.known("00", "a.B")
