"""Requests to the server over HTTP: JSON, followed by the bytes of tensors, decoded and checked against a model.

The first two bytes of an input are the length of its JSON; with 65535 the request declares no length.
"""

from __future__ import annotations

import json
from functools import cache
from random import Random
from types import SimpleNamespace
from typing import Any

from fuzz.judge import ours
from fuzz.trees import mutated_bytes, mutated_json
from optdnn.runtime.contexts.signature import Signature
from optdnn.serving.checking import check_outputs, checked_request
from optdnn.serving.core import placed
from optdnn.serving.facts import ModelFacts
from optdnn.serving.http_messages import HttpRequest
from optdnn.serving.regions import Regions
from optdnn.serving.repository import Model
from optdnn.serving.sizes import BatchSizes
from optdnn.types import DTYPES, TensorSpec

COVERED = ("optdnn.serving", "optdnn.runtime.contexts")
NO_LENGTH = 0xFFFF


def seeds() -> list[bytes]:
    row = {"name": "x", "datatype": "FP32", "shape": [2, 3]}
    flag = {"name": "flag", "datatype": "BOOL", "shape": [2, 2], "data": [[True, False], [False, True]]}
    raw = {**row, "parameters": {"binary_data_size": 24}}
    shared = {
        **row,
        "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 24, "shared_memory_offset": 0},
    }
    parameters = {"priority": 1, "timeout": 1000, "binary_data_output": True}
    wanted = [{"name": "y", "parameters": {"binary_data": True}}]
    requests: list[tuple[Any, bytes]] = [
        ({"id": "1", "inputs": [raw, flag], "outputs": wanted, "parameters": parameters}, bytes(24)),
        ({"inputs": [{**row, "data": [1, 2.5, 3, -4, 5e10, 0]}, flag], "outputs": [{"name": "y"}]}, b""),
        ({"inputs": [shared, flag], "parameters": {"sequence_id": 1}}, b""),
    ]
    found = [joined(json.dumps(head).encode(), rest, True) for head, rest in requests]
    return [*found, joined(json.dumps(requests[1][0]).encode(), b"", False)]


def joined(head: bytes, rest: bytes, announced: bool) -> bytes:
    return (len(head) if announced else NO_LENGTH).to_bytes(2, "little") + head + rest


def mutate(data: bytes, rng: Random) -> bytes:
    length = int.from_bytes(data[:2], "little")
    head, rest = data[2 : 2 + length], data[2 + length :]
    if rng.random() < 0.8:
        head = mutated_json(head, rng)
    else:
        rest = mutated_bytes(rest, rng)
    if rng.random() < 0.05:
        return mutated_bytes(data, rng)
    return joined(head[: NO_LENGTH - 1], rest, length != NO_LENGTH)


@cache
def model() -> Any:
    """The facts of a model with batches, in place of those of a loaded model."""
    specs = (TensorSpec("x", DTYPES["fp32"], ("n", 3)), TensorSpec("flag", DTYPES["bool"], ("n", 2)))
    facts = ModelFacts(specs, (TensorSpec("y", DTYPES["fp32"], ("n", 3)),), (), (), "cpu", "n", "")
    signature = Signature(facts.inputs, facts.outputs, facts.profiles)
    made = SimpleNamespace(facts=facts, signature=signature, _sizes=BatchSizes(facts, 8))
    made.check_shapes = lambda shapes: Model.check_shapes(made, shapes)
    return made


def one_input(data: bytes) -> None:
    length = int.from_bytes(data[:2], "little")
    with ours():
        request = HttpRequest(memoryview(data)[2:], None if length == NO_LENGTH else str(length))
        call = request.call("model", "")
        check_outputs(model(), call.outputs)
        given, _ = placed(call, Regions(True))
        checked_request(model(), given, call.parameters, call.timeout_s)
