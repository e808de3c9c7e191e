"""The kind of another program's file, by its first bytes: for errors that tell what to do with the file."""

from __future__ import annotations

BEGINNING = 64
"""Number of first bytes that determine a file's kind."""
KINDS: tuple[tuple[bytes, int, str, str], ...] = (
    (b"\x89OPTDNN\n", 0, "an optdnn engine", "optdnn run, inspect and serve read it"),
    (
        b"version https://git-lfs", 0,
        "a Git LFS pointer, not the file itself",
        "git lfs pull fetches the file",
    ),
    (b"PK\x03\x04", 0, "a zip archive, such as a PyTorch checkpoint",
     "load it in PyTorch, and give the module to optdnn.from_torch or torch.onnx.export"),
    (b"\x80\x02", 0, "a pickle, such as an old PyTorch checkpoint",
     "load it in PyTorch, and give the module to optdnn.from_torch or torch.onnx.export"),
    (b"ftrt", 0, "a TensorRT engine", "only TensorRT reads it: build from the ONNX model that it was made of"),
    (b"TFL3", 4, "a TensorFlow Lite model", "tf2onnx --tflite writes it as ONNX"),
    (b"\x89HDF\r\n\x1a\n", 0, "an HDF5 file, such as a Keras model", "load it in Keras, and export it with tf2onnx"),
    (b"ORTM", 4, "a model in the format of ONNX Runtime (.ort)", "give the ONNX model that it was made of"),
    (b"\x1f\x8b", 0, "a gzip archive", "unpack it first"),
    (b"GGUF", 0, "a GGUF model", "give an ONNX export of the model"),
    (b'{"', 8, "a file with only weights (safetensors)", "load them into the module in PyTorch, and give it to optdnn.from_torch"),
    (b"\x93NUMPY", 0, "a NumPy array", "give the ONNX model"),
    (b"<?xml", 0, "an XML file, such as an OpenVINO model", "give the ONNX model that it was made of"),
    (b"<!DOCTYPE", 0, "an HTML page", "it may be the error page of a download"),
    (b"<html", 0, "an HTML page", "it may be the error page of a download"),
)  # fmt: skip
"""First bytes, their offset, the kind of the file, and what to do with it."""


def kind_of(data: bytes) -> tuple[str, str] | None:
    """The kind of a file that begins with ``data``, and what to do with it; None if the first bytes are unknown."""
    for magic, at, kind, advice in KINDS:
        if data[at : at + len(magic)] == magic:
            return kind, advice
    return None
