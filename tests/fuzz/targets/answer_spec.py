"""Postprocessing of outputs: a spec (text or an object) is read and added after an imported network."""

from __future__ import annotations

import json
from random import Random

from fuzz.judge import ours
from fuzz.targets.image_spec import network
from fuzz.trees import mutated_bytes, mutated_json
from optdnn.answer_spec import AnswerSpec
from optdnn.image_spec import ImageSpec
from optdnn.importers.onnx import import_model
from optdnn.importers.pictures import with_pictures

COVERED = ("optdnn.answer_spec", "optdnn.importers.pictures", "optdnn.importers.picture_nodes")


def seeds() -> list[bytes]:
    objects = [
        {"softmax": True, "top_k": 2, "axis": 1, "labels": ["a", "b", "c"]},
        {"argmax": True, "axis": 1},
        {"boxes": "cxcywh", "relative": True, "input": "x"},
    ]
    texts = [b"softmax+top-k:5", b"argmax,axis=1", b"boxes:xywh,relative,input=x", b"top-k:3,labels=/dev/null"]
    return [*(json.dumps(o).encode() for o in objects), *texts]


def mutate(data: bytes, rng: Random) -> bytes:
    return mutated_json(data, rng) if data[:1] == b"{" else mutated_bytes(data, rng)


def one_input(data: bytes) -> None:
    with ours():
        given = data.decode("utf-8", "surrogateescape")
        if data[:1] == b"{":
            try:
                given = json.loads(data)
            except (ValueError, RecursionError):
                return
        spec = AnswerSpec.of(given)
        AnswerSpec.of(json.loads(json.dumps(spec.to_plain())))
        import_model(with_pictures(network(), {"x": ImageSpec(resize=(8, 8), crop=None)}, {"y": spec}))
