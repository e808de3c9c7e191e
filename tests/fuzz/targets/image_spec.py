"""Preprocessing of pictures: a spec is read, written as plain data, and added before an imported network."""

from __future__ import annotations

import json
from functools import cache
from random import Random

import onnx
import onnx.parser

from fuzz.judge import ours
from fuzz.trees import mutated_json
from optdnn.image_spec import ImageSpec
from optdnn.importers.onnx import import_model
from optdnn.importers.pictures import with_pictures

COVERED = ("optdnn.image_spec", "optdnn.importers.pictures", "optdnn.importers.picture_nodes", "optdnn.text_file")
TEXT = '<ir_version: 9, opset_import: ["" : 18]> g (float[n, 3, 8, 8] x) => (float[n, 3, 8, 8] y) { y = Relu(x) }'


def seeds() -> list[bytes]:
    contain = {"resize": [8, 8], "crop": None, "fit": "contain", "pad_value": 114}
    gray = {"layout": "chw", "dtype": "fp32", "color": "L"}
    specs = [
        {"resize": 8, "crop": 8},
        {**contain, "interpolation": "cubic", "antialias": False},
        {"resize": None, "crop": [4, 4], "pad": [2, 2, 2, 2], "pad_mode": "reflect", "color": "BGR", "layout": "chw"},
        {"resize": 8, "crop": 8, "mean": 0.5, "std": [0.5, 0.5, 0.5], "scale": 1, "input": gray},
    ]
    return [json.dumps(spec).encode() for spec in specs]


def mutate(data: bytes, rng: Random) -> bytes:
    return mutated_json(data, rng)


@cache
def network() -> onnx.ModelProto:
    return onnx.parser.parse_model(TEXT)


def one_input(data: bytes) -> None:
    with ours():
        spec = ImageSpec.read(data.decode("utf-8", "surrogateescape"))
        ImageSpec.of(json.loads(json.dumps(spec.to_plain())))
        import_model(with_pictures(network(), {"x": spec}, {}))
