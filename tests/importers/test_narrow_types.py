"""Elements of 2, 4, 6 and 8 bits in ONNX's packing, in weights and in all other parts of a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import optdnn
import optdnn.integrations.onnx_backend
from optdnn.errors import ModelError
from optdnn.importers.external_data import ExternalData
from optdnn.importers.onnx import import_model
from optdnn.importers.split_weights import put_together, split_weights
from optdnn.importers.tensors import to_array
from optdnn.ir.evaluate import evaluate
from optdnn.ir.export_onnx import export_model
from optdnn.ir.onnx_protos import tensor_proto
from optdnn.ops.exchange import onnx_number
from optdnn.types import DTYPES, NARROW_FLOATS, NARROW_INTEGERS, bits_of, packed, packed_bytes, unpacked

PACKED = [d for d in (*NARROW_INTEGERS, *NARROW_FLOATS) if bits_of(d) < 8]
NO_FILES = ExternalData(None, "m")


def values(dtype: Any, count: int) -> Any:
    """Every code, repeated."""
    return unpacked(np.resize(np.arange(256, dtype=np.uint8), packed_bytes(dtype, count)), dtype, count)


@pytest.mark.parametrize("dtype", PACKED, ids=str)
@pytest.mark.parametrize("count", [0, 1, 5, 64])
def test_packing_is_onnx(dtype: Any, count: int) -> None:
    array = values(dtype, count)
    np.testing.assert_array_equal(unpacked(packed(array), dtype, count).view(np.uint8), array.view(np.uint8))
    theirs = numpy_helper.from_array(array, "t")
    assert packed(array).tobytes() == theirs.raw_data
    np.testing.assert_array_equal(to_array(theirs, NO_FILES, "m").astype(np.float32), array.astype(np.float32))
    ours = tensor_proto(array, "t")
    np.testing.assert_array_equal(numpy_helper.to_array(ours).astype(np.float32), array.astype(np.float32))
    assert ours.data_type == onnx_number(dtype)


def test_fields_of_integers_hold_packed_bytes() -> None:
    t = TensorProto(name="t", data_type=TensorProto.INT4, dims=[3])
    t.int32_data.extend([0x98, 0x07])
    assert to_array(t, NO_FILES, "m").astype(int).tolist() == [-8, -7, 7]
    t.int32_data.append(1)
    with pytest.raises(ModelError, match=r"declared as \[3\] \(2 bytes\) but holds 3"):
        to_array(t, NO_FILES, "m")
    t = TensorProto(name="t", data_type=TensorProto.UINT2, dims=[5], raw_data=b"\xe4")
    with pytest.raises(ModelError, match=r"2 bytes\) but holds 1 bytes"):
        to_array(t, NO_FILES, "m")


def weights_only(dtype: Any, k: int = 64, n: int = 48, block: int = 16) -> tuple[onnx.ModelProto, Any]:
    """``x @ dequantized(w)`` with scales per block of K (opset 25), and the dequantized weights."""
    rng = np.random.default_rng(3)
    w = values(dtype, k * n)
    w = rng.permutation(w.astype(np.float32)).astype(dtype).reshape(k, n)
    scale = rng.uniform(0.01, 0.1, (k // block, n)).astype(np.float32)
    integer = dtype in NARROW_INTEGERS
    operands = ["w", "scale", "zero"] if integer else ["w", "scale"]
    zero = np.ones((k // block, n)).astype(dtype)
    node = [
        helper.make_node("DequantizeLinear", operands, ["d"], axis=0, block_size=block),
        helper.make_node("MatMul", ["x", "d"], ["y"]),
    ]
    tensors = [numpy_helper.from_array(a, m) for a, m in ((w, "w"), (scale, "scale"), (zero, "zero")) if m in operands]
    io = [helper.make_tensor_value_info(m, TensorProto.FLOAT, [2, s]) for m, s in (("x", k), ("y", n))]
    graph = helper.make_graph(node, "weights_only", io[:1], io[1:], tensors)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=11)
    shift = zero.astype(np.float32).repeat(block, 0) if integer else 0.0
    return made, (w.astype(np.float32) - shift) * scale.repeat(block, 0)


@pytest.mark.parametrize("dtype", [DTYPES[n] for n in ("int4", "uint4", "int2", "uint2", "fp4_e2m1")], ids=str)
@pytest.mark.parametrize("target", ["reference", "simulate"])
def test_weights_in_blocks(dtype: Any, target: str) -> None:
    model, w = weights_only(dtype)
    x = np.random.default_rng(4).standard_normal((2, w.shape[0])).astype(np.float32)
    engine = optdnn.build(model, target=target)
    np.testing.assert_allclose(engine.run({"x": x})["y"], x @ w, rtol=1e-5, atol=1e-5)
    if target == "simulate":
        assert engine.meta["host"]["operators"] == []
        assert engine.meta["operators"] == {"Gemm": 1, "PackedGather": 1}


def test_weights_on_the_cpu() -> None:
    pytest.importorskip("onnxruntime", reason="the cpu extra is not installed")
    model, w = weights_only(DTYPES["int4"])
    x = np.random.default_rng(4).standard_normal((2, w.shape[0])).astype(np.float32)
    engine = optdnn.build(model, target="cpu", tactics="onnxruntime", threads=1)
    np.testing.assert_allclose(engine.run({"x": x})["y"], x @ w, rtol=1e-5, atol=1e-5)
    assert [f["library"] for f in engine.facts] == ["onnxruntime"]


def test_models_keep_them_apart_from_their_file(tmp_path: Path) -> None:
    model, w = weights_only(DTYPES["int4"])
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, size_threshold=0, location="m.data")
    x = np.ones((2, w.shape[0]), np.float32)
    data, weights = split_weights(tmp_path / "m.onnx")
    assert "w" not in weights  # half a byte per element: it stays in the model
    for graph in (import_model(tmp_path / "m.onnx"), import_model(put_together(data, weights, "held"))):
        np.testing.assert_allclose(evaluate(graph, {"x": x})["y"], x @ w, rtol=1e-5, atol=1e-5)
    written = export_model(graph, external_weights=True)
    written.save(tmp_path / "again.onnx")
    again = import_model(tmp_path / "again.onnx")
    np.testing.assert_allclose(evaluate(again, {"x": x})["y"], x @ w, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("mode", "wanted"), [("up", [0.25, 1, 4, 4]), ("down", [0.125, 1, 2, 2]), ("nearest", [0.125, 1, 4, 2])]
)
def test_powers_of_two_round_as_asked(mode: str, wanted: list[float]) -> None:
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E8M0, round_mode=mode)
    (y,) = optdnn.integrations.onnx_backend.run_node(
        node, np.array([0.15, 1, 3, 2.5], np.float32), "REFERENCE", opset_version=25
    )
    assert y.astype(np.float32).tolist() == wanted
