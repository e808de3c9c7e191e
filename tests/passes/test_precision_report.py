"""Promises to users, tested as a user would: odd models, threads, sizes, bytes, processes."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from support.onnxnet import convnet
from support.sweep import sweep

import optdnn
from optdnn.models import zoo
from optdnn.runtime.contexts.feeds import random_feeds
from optdnn.types import Array

ort = pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")
pytest.importorskip("openvino", reason="the cpu extra is not installed")

ROOT = Path(__file__).parents[2]
BUILDS: dict[str, dict[str, Any]] = {
    "reference": {"target": "reference"},
    "openvino": {"target": "cpu", "tactics": "openvino", "threads": 1},
    "onnxruntime": {"target": "cpu", "tactics": "onnxruntime", "threads": 1},
}
ODD = {
    "an input is the output": "(float[2,3] x) => (float[2,3] x) { }",
    "an input is one of two outputs": "(float[2,3] x) => (float[2,3] x, float[2,3] y) { y = Relu(x) }",
    "a constant output": "(float[2] x) => (float[2] y, float[2] c) <float[2] c = {1.0, 2.0}> { y = Relu(x) }",
    "no input": "() => (float[2] c) { c = Constant<value_floats = [1.0, 2.0]>() }",
    "one value, three outputs": "(float[2] x) => (float[2] b, float[2] a, float[2] c)"
    " { a = Relu(x) b = Identity(a) c = Relu(x) }",
    "an unused input": "(float[2] x, float[4] z) => (float[2] y) { y = Relu(x) }",
    "nothing inside": "(float[0,3] x) => (float[0,3] y, float[3] s) <int64[1] a = {0}>"
    " { y = Relu(x) s = ReduceSum<keepdims = 0>(x, a) }",
    "scalars": "(float x, float[3] z) => (float s, float[3] y) { s = Exp(x) y = Mul(x, z) }",
    "int32": "(int32[2] x) => (int32[2] y) { y = Add(x, x) }",
    "int64": "(int64[2] x) => (int64[2] y) { y = Mul(x, x) }",
    "int8": "(int8[2] x) => (float[2] y) { y = Cast<to = 1>(x) }",
    "uint8": "(uint8[2] x) => (float[2] y, uint8[2] z) { y = Cast<to = 1>(x) z = Identity(x) }",
    "bool": "(bool[2] x, bool[2] z) => (bool[2] y) { y = And(x, z) }",
    "a comparison": "(float[2] x, float[2] z) => (bool[2] y) { y = Less(x, z) }",
    "double": "(double[2] x) => (double[2] y) { y = Exp(x) }",
    "float16": "(float16[2] x) => (float16[2] y) { y = Exp(x) }",
    "bfloat16": "(bfloat16[2] x) => (bfloat16[2] y) { y = Relu(x) }",
    "positions": "(float[2,3] x) => (int64[2,1] y) { y = ArgMax<axis = 1>(x) }",
    "the shape of a symbolic input": "(float[n,3] x) => (int64[2] y) { y = Shape(x) }",
    "symbolic sizes": "(float[n,3,h,w] x) => (float[n,3,p,q] y) { y = MaxPool<kernel_shape = [2, 2]>(x) }",
}


def parse(text: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 17]> g {text}')


def run_ort(model: onnx.ModelProto | str, feeds: dict[str, Array]) -> list[Array]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    given = model if isinstance(model, str) else model.SerializeToString()
    results: list[Array] = ort.InferenceSession(given, options).run(None, feeds)
    return results


BY_LIBRARIES = (
    *("an input is one of two outputs", "a constant output", "no input", "nothing inside", "scalars"),
    *("uint8", "bool", "bfloat16", "symbolic sizes"),
)
"""Odd models that the libraries run with the quick tests: they are asked otherwise there."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "how"),
    sweep(
        [(name, how) for name in ODD for how in BUILDS],
        *((name, "reference") for name in list(ODD)[::3]),
        *((name, how) for name in BY_LIBRARIES for how in BUILDS),
    ),
)
def test_odd_models(name: str, how: str, tmp_path: Path) -> None:
    model = parse(ODD[name])
    built = optdnn.build(model, **BUILDS[how])
    built.save(tmp_path / "e")
    engine = optdnn.load(tmp_path / "e")
    feeds = random_feeds(engine.inputs, sizes={d: 4 for s in engine.inputs for d in s.shape if isinstance(d, str)})
    y = engine.run(feeds)
    assert [s.name for s in engine.inputs] == [i.name for i in model.graph.input]
    assert list(y) == [s.name for s in engine.outputs] == [o.name for o in model.graph.output]
    for o, a in zip(model.graph.output, y.values(), strict=True):
        assert a.dtype == onnx.helper.tensor_dtype_to_np_dtype(o.type.tensor_type.elem_type)
        assert a.flags.writeable
    if name != "bfloat16":  # ONNX Runtime has no bfloat16 on the CPU
        for a, want in zip(y.values(), run_ort(model, feeds), strict=True):
            np.testing.assert_allclose(a, want, rtol=2e-3 if a.dtype == np.float16 else 1e-5)
    arrays = [*feeds.values(), *y.values(), *engine.run(feeds).values()]
    assert not any(np.may_share_memory(a, b) for a, b in itertools.combinations(arrays, 2)), "results are fresh"
    out = {k: np.zeros_like(v) for k, v in y.items()}
    into = engine.context().run(feeds, out=out)
    for k in y:
        assert into[k] is out[k]
        assert into[k].tobytes() == y[k].tobytes()
    once = engine(*feeds.values())
    assert isinstance(once, np.ndarray) == (len(y) == 1)


@pytest.mark.parametrize("how", BUILDS)
def test_threads_and_sizes_without_a_new_build(how: str) -> None:
    engine = optdnn.build(convnet(batch="N"), **BUILDS[how])
    rng = np.random.default_rng(0)
    inputs = [rng.standard_normal((1 + i % 5, 3, 8, 8)).astype(np.float32) for i in range(20)]
    want = [run_ort(convnet(batch="N"), {"x": x})[0] for x in inputs]
    wrong: list[str] = []

    def work(seed: int) -> None:
        order, context = np.random.default_rng(seed), engine.context()
        for i in order.integers(0, len(inputs), 60):
            buffer = np.empty_like(want[i])
            for y in (engine(inputs[i]), context.run({"x": inputs[i]}, out={"y": buffer})["y"]):
                if y.shape != want[i].shape or np.abs(y - want[i]).max() > 1e-5 * np.abs(want[i]).max():
                    wrong.append(f"input {i} in thread {seed}")

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_emitted_onnx_is_the_network(level: int, tmp_path: Path) -> None:
    emitted = tmp_path / "e.onnx"
    model = convnet(batch="N")
    optdnn.build(model, target="reference", opt_level=level, emit_onnx=str(emitted))
    onnx.checker.check_model(str(emitted), full_check=True)
    feeds: dict[str, Array] = {"x": np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)}
    np.testing.assert_allclose(run_ort(str(emitted), feeds)[0], run_ort(model, feeds)[0], rtol=1e-4, atol=1e-5)
    assert any(n.op_type == "BatchNormalization" for n in onnx.load(emitted).graph.node) == (level < 2)


def test_emitted_onnx_of_much_weight_has_it_in_a_file_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optdnn.compiler.ONE_FILE", 100)
    model = convnet(channels=16)
    optdnn.build(model, target="reference", emit_onnx=tmp_path / "e.onnx")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["e.onnx", "e.onnx.data"]
    feeds: dict[str, Array] = {"x": np.random.default_rng(1).standard_normal((1, 3, 8, 8)).astype(np.float32)}
    want = run_ort(model, feeds)[0]
    np.testing.assert_allclose(run_ort(str(tmp_path / "e.onnx"), feeds)[0], want, rtol=1e-4, atol=1e-5)
    again = optdnn.build(tmp_path / "e.onnx", target="reference")
    np.testing.assert_allclose(again.run(feeds)["y"], want, rtol=1e-4, atol=1e-5)


def in_process(code: str, folder: Path, seed: int) -> str:
    """Run ``code`` from the clone's root with another order of sets and dictionaries of text; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", f"import os\nos.chdir({str(ROOT)!r})\nfolder = {str(folder)!r}\n{code}"],
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


BUILD_ALL = """
import hashlib, optdnn
for name in ("conv.onnx", "bert.onnx"):
    for target in ("cpu", "reference"):
        engine = optdnn.build(f"{folder}/{name}", target=target, timing_cache=f"{folder}/times.json")
        engine.save(f"{folder}/{name}.{target}.engine")
        print(name, target, hashlib.sha256(open(f"{folder}/{name}.{target}.engine", "rb").read()).hexdigest())
"""
LOAD_ALL = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("onnx", "networkx", "click", "rich"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import optdnn
from optdnn.runtime.contexts.feeds import random_feeds
for name in ("conv.onnx.cpu", "conv.onnx.reference", "bert.onnx.cpu", "bert.onnx.reference"):
    engine = optdnn.load(f"{folder}/{name}.engine")
    print([a.shape for a in engine.run(random_feeds(engine.inputs)).values()])
"""


@pytest.mark.slow
def test_processes_agree_on_every_byte_and_need_no_compiler_to_run(tmp_path: Path) -> None:
    onnx.save(convnet(batch="N"), tmp_path / "conv.onnx")
    onnx.save(zoo.build("bert_base", depth=0.1, width=0.1), tmp_path / "bert.onnx")
    first = in_process(BUILD_ALL, tmp_path, seed=1)
    assert len(set(first.split())) == 4 + 4  # two models, two targets, four different engines
    assert in_process(BUILD_ALL, tmp_path, seed=2) == first
    assert len(in_process(LOAD_ALL, tmp_path, seed=3).splitlines()) == 4
