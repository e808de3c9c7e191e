"""Tensors of every type in every encoding, and external data: reading and refusals."""

from __future__ import annotations

import os
import sys

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from onnxtext import model

from optdnn.errors import ModelError
from optdnn.importers import tensors
from optdnn.importers.external_data import ExternalData
from optdnn.importers.onnx import import_model
from optdnn.importers.tensors import to_array
from optdnn.ir.evaluate import evaluate
from optdnn.ops.base import Unsupported
from optdnn.types import ONNX_TYPES, dtype_name, packed

NOWHERE = ExternalData(None, "m")
TYPES = sorted(ONNX_TYPES.items())


def example(dtype: np.dtype) -> np.ndarray:
    values = np.array([[0, 1, 2], [3, 1, 0]]) if dtype.name != "int2" else np.array([[0, 1, -1], [-2, 1, 0]])
    return (values > 0) if dtype.kind == "b" else values.astype(dtype)


@pytest.mark.parametrize(("code", "dtype"), TYPES, ids=[dtype_name(d) for _, d in TYPES])
def test_every_element_type_raw_and_in_fields(code, dtype):
    want = example(dtype)
    raw = TensorProto(name="t", data_type=code, dims=want.shape, raw_data=packed(want).tobytes())
    assert raw.data_type == onnx.helper.np_dtype_to_tensor_dtype(want.dtype)
    fields = onnx.helper.make_tensor("t", code, want.shape, want.reshape(-1).tolist())
    assert not fields.raw_data
    for t in (raw, fields):
        got = to_array(t, NOWHERE, "m")
        assert got.dtype == dtype
        assert got.shape == want.shape
        assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("dtype", [np.float32, np.int16, ml_dtypes.bfloat16, np.complex64, np.bool_])
def test_raw_data_is_little_endian_whatever_the_machine(dtype, monkeypatch):
    # A big-endian machine swaps its native bytes to those of the file.
    want = example(np.dtype(dtype))
    t = TensorProto(name="t", data_type=onnx.helper.np_dtype_to_tensor_dtype(want.dtype), dims=want.shape)
    part = 4 if want.dtype.kind == "c" else want.dtype.itemsize
    t.raw_data = want.reshape(-1).view(np.uint8).reshape(-1, part)[:, ::-1].tobytes()
    monkeypatch.setattr(sys, "byteorder", "big")
    assert to_array(t, NOWHERE, "m").tobytes() == want.tobytes()


def test_a_bool_of_any_nonzero_byte_is_one():
    t = TensorProto(name="t", data_type=TensorProto.BOOL, dims=[3], raw_data=b"\x00\x02\xff")
    assert to_array(t, NOWHERE, "m").view(np.uint8).tolist() == [0, 1, 1]


@pytest.mark.parametrize("code", [TensorProto.STRING, 0, 77])
def test_element_types_that_are_not_stored(code):
    with pytest.raises(Unsupported, match="element type"):
        to_array(TensorProto(name="t", data_type=code, dims=[1]), NOWHERE, "m")


def test_segments_are_not_supported():
    t = numpy_helper.from_array(np.zeros(2, np.float32), "t")
    t.segment.begin = 0
    with pytest.raises(Unsupported, match="segments"):
        to_array(t, NOWHERE, "m")


@pytest.mark.parametrize("raw", [b"", b"\0" * 7, b"\0" * 12])
def test_data_that_does_not_fill_the_shape(raw):
    t = TensorProto(name="t", data_type=TensorProto.FLOAT, dims=[2], raw_data=raw)
    with pytest.raises(ModelError, match=r"m: tensor 't' is declared as \[2\]"):
        to_array(t, NOWHERE, "m")


@pytest.mark.parametrize(
    ("code", "value"), [(TensorProto.UINT8, 300), (TensorProto.INT8, -200), (TensorProto.UINT16, -1)]
)
def test_a_number_that_its_type_cannot_hold(code, value):
    """For example, a zero point of 300."""
    t = TensorProto(name="t", data_type=code, dims=[2], int32_data=[1, value])
    with pytest.raises(ModelError, match=f"tensor 't' holds {value}, which is no u?int"):
        to_array(t, NOWHERE, "m.onnx")


def test_misaligned_bytes_are_copied():
    data = np.arange(9, dtype=np.uint8)[1:]
    got = tensors._from_bytes(data, np.dtype(np.float64), 1)
    assert got.flags.aligned
    assert got.tobytes() == data.tobytes()


# ---------------------------------------------------------------- external data


@pytest.fixture
def stored(tmp_path):
    """A model with its weight in weights/w.bin, its path, and a function that changes its external_data entries."""
    folder = tmp_path / "net"
    (folder / "weights").mkdir(parents=True)
    w = np.arange(12, dtype=np.float32).reshape(3, 4)
    (folder / "weights" / "w.bin").write_bytes(b"\0" * 8 + w.tobytes())
    m = model("g (float[2, 3] x) => (float[2, 4] y) { [mm] y = MatMul(x, w) }")

    def write(**entries: str):
        del m.graph.initializer[:]
        t = m.graph.initializer.add(name="w", data_type=TensorProto.FLOAT, dims=[3, 4])
        t.data_location = TensorProto.EXTERNAL
        for key, value in {"location": "weights/w.bin", "offset": "8", "length": "48", **entries}.items():
            if value is not None:
                t.external_data.add(key=key, value=value)
        path = folder / "net.onnx"
        path.write_bytes(m.SerializeToString())
        return path

    return folder, w, write


def test_external_data_is_mapped(stored):
    folder, w, write = stored
    x = np.ones((2, 3), np.float32)
    for entries in ({}, {"length": None}):
        graph = import_model(write(**entries))
        assert evaluate(graph, {"x": x})["y"].tolist() == (x @ w).tolist()
    array = graph.of_kind("Constant")[0].attrs.value
    assert not array.flags.owndata
    assert not array.flags.writeable
    os.symlink("weights/w.bin", folder / "inside")
    assert evaluate(import_model(write(location="inside")), {"x": x})["y"].tolist() == (x @ w).tolist()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"location": "none.bin"}, r"tensor 'w': external data file .*net/none\.bin cannot be read"),
        ({"location": "../secret"}, "'../secret' leads out of the model's folder"),
        ({"location": "weights/../../secret"}, "leads out of the model's folder"),
        ({"location": "weights\\..\\..\\secret"}, "leads out of the model's folder"),
        ({"location": "/etc/passwd"}, "'/etc/passwd' is not a relative path"),
        ({"location": "C:\\secret"}, "is not a relative path"),
        ({"location": "a\0b"}, "is not a relative path"),
        ({"location": "link"}, "is a link out of the model's folder"),
        ({"location": "linked/secret"}, "is a link out of the model's folder"),
        ({"location": "weights"}, "is not a regular file"),
        ({"location": "pipe"}, "is not a regular file"),
        ({"location": None}, "external data without a location"),
        ({"offset": "9"}, r"wants bytes 9 to 57 of 'weights/w\.bin', which has 56"),
        ({"offset": "-8"}, "offset '-8' is not a non-negative integer"),
        ({"offset": "8 "}, "offset '8 ' is not a non-negative integer"),
        ({"length": "47"}, "needs 48 bytes for its shape and type, its external data declares 47"),
        ({"length": "1" * 30}, "is not a non-negative integer"),
    ],
)
def test_external_data_that_is_refused(stored, entries, message):
    folder, _, write = stored
    (folder.parent / "secret").write_bytes(b"\0" * 56)
    os.symlink(folder.parent / "secret", folder / "link")
    os.symlink(folder.parent, folder / "linked")
    os.mkfifo(folder / "pipe")
    with pytest.raises(ModelError, match=message):
        import_model(write(**entries))


def test_external_data_of_a_model_that_is_no_file(stored):
    _, _, write = stored
    with pytest.raises(ModelError, match=r"'weights/w\.bin', but the model was not given as a file"):
        import_model(write().read_bytes())
