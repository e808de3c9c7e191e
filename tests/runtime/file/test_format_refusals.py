"""The engine file: only files in the writer's form are read."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import random
import re
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from programs import F32, mlp, program
from support.engine_bytes import contents, decode, everything, forge

from optdnn import Engine, load
from optdnn.errors import EngineError, ModelError, OptdnnError, UsageError
from optdnn.importers.model import open_model
from optdnn.runtime.file import format as fmt
from optdnn.runtime.file import header
from optdnn.runtime.file.kinds import KINDS
from optdnn.runtime.program import ByValue, Dynamic, Source, Step
from optdnn.runtime.reference.nested import PlainGraph
from optdnn.runtime.steps.reference import reference_step

# ---------------------------------------------------------------- reading refuses: files


def test_files_that_are_no_engines(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "short").write_bytes(fmt.MAGIC)
    (tmp_path / "net.onnx").write_bytes(b"\x08\x07\x12\x07pytorch" + bytes(100))
    (tmp_path / "crlf").write_bytes(contents(mlp()).replace(b"\n", b"\r\n", 1))
    for name, message in (
        ("fifo", "not a regular file"),
        (".", "cannot be read"),
        ("empty", "truncated: 0 bytes"),
        ("short", "truncated: 8 bytes"),
        ("net.onnx", r"is not an optdnn engine\n  hint: it is a model: optdnn build "),
        ("crlf", "is not an optdnn engine"),
    ):
        with pytest.raises(EngineError, match=message):
            load(tmp_path / name)
    with pytest.raises(UsageError, match="there is no engine file"):
        load(tmp_path / "none")


@pytest.mark.parametrize("path", [contents(mlp()), None, 7])
def test_an_engine_is_given_by_its_path(path: Any) -> None:
    with pytest.raises(
        UsageError, match=r"from its file, not from (bytes|NoneType|int)\n  hint: give the path"
    ) as raised:
        load(path)
    assert len(str(raised.value)) < 200


@pytest.mark.parametrize(("magic", "at", "kind"), [row[:3] for row in KINDS if row[0] != fmt.MAGIC])
def test_files_of_other_programs_are_named(tmp_path: Path, magic: bytes, at: int, kind: str) -> None:
    data = bytes(at) + magic + bytes(200)
    (tmp_path / "other.engine").write_bytes(data)
    with pytest.raises(EngineError, match=re.escape(f"other.engine: this is {kind}, not an optdnn engine\n  hint: ")):
        load(tmp_path / "other.engine")
    with pytest.raises(ModelError, match=re.escape(f"model is {kind}, not an ONNX model\n  hint: ")):
        open_model(data)


def test_an_engine_is_no_model() -> None:
    with pytest.raises(ModelError, match="model is an optdnn engine, not an ONNX model\n  hint: optdnn run"):
        open_model(contents(mlp()))


def test_other_versions() -> None:
    data = contents(mlp())

    def version(major: int, minor: int) -> bytes:
        return data[:8] + struct.pack("<HH", major, minor) + data[12:]

    for v, message in (
        ((2, 0), r"has format 2.0; this version of optdnn reads 1.0 to 1.7\n  hint: upgrade"),
        ((1, 8), r"has format 1.8; .*\n  hint: upgrade"),
        ((0, 9), r"has format 0.9; .*\n  hint: rebuild"),
    ):
        with pytest.raises(EngineError, match=message):
            decode(version(*v))


BODY = {"graph": [0, [], [], [], []]}
LOOP = Step("reference", {"kind": "Loop", "attrs": {"body": BODY}}, (), ())
SOURCE = Source(0, {}, {})
ADDED_IN_6 = {
    "what a launch waits for": {"steps": (Step("cuda", {"launch": {"waits": "nothing"}}, (), ()),)},
    "inputs that may be empty": {"steps": (Step("openvino", {"empty": ["x"]}, (), ()),)},
    "shapes of a body": {"steps": (LOOP,)},
    "calibration": {"dynamic": Dynamic((), (), (), replace(SOURCE, calibration=1), 0)},
    "calibration of plans by value": {"by_value": ByValue(("x",), replace(SOURCE, calibration=1))},
}
BEFORE_6 = {
    "no waits": ({"steps": (Step("cuda", {"launch": {"kernel": 0}}, (), ()),)}, 0),
    "no empty inputs": ({"steps": (Step("openvino", {"weights": {}}, (), ()),)}, 0),
    "a body without shapes": ({"steps": (replace(LOOP, params={"body": {"graph": [0, [], [], []]}}),)}, 0),
    "no calibration": ({"dynamic": Dynamic((), (), (), SOURCE, 0)}, 2),
}


@pytest.mark.parametrize("parts", ADDED_IN_6.values(), ids=ADDED_IN_6.keys())
def test_additions_raise_the_minor_version(parts: dict[str, Any]) -> None:
    changed = replace(mlp(), **parts)
    assert header.minor_of(changed) == 6
    plans = Dynamic((), (), (replace(changed, dynamic=None, by_value=None),), None, 0)
    assert header.minor_of(replace(mlp(), dynamic=plans)) == (6 if "steps" in parts else 2)
    text = header.header_text(changed, [])
    assert header.minor_of(header.parse_header(text, 6)[0]) == 6
    for older in (0, 5):
        with pytest.raises(EngineError):
            header.parse_header(text, older)


@pytest.mark.parametrize(("parts", "minor"), BEFORE_6.values(), ids=BEFORE_6.keys())
def test_without_additions_the_minor_version_stays(parts: dict[str, Any], minor: int) -> None:
    assert header.minor_of(replace(mlp(), **parts)) == minor


def test_a_reader_of_the_version_before_refuses_additions(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = PlainGraph(2, (), (), (1, 0), ((), (), (), ()))
    loop = reference_step("Loop", {"body": counts, "carried": 0}, (0, -1), (1,))
    data = contents(program([("n", np.int64, ())], [("i", 1)], [loop], [(np.int64, ("n",))]))
    assert struct.unpack_from("<HH", data, 8) == (1, 6)
    assert Engine(decode(data)).run({"n": np.array(3)})["i"].tolist() == [0, 1, 2]
    monkeypatch.setattr(fmt, "VERSION", (1, 5))
    with pytest.raises(EngineError, match=r"has format 1.6; this version of optdnn reads 1.0 to 1.5\n  hint: upgrade"):
        decode(data)


def test_big_endian_machines_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = contents(mlp())
    monkeypatch.setattr(fmt.sys, "byteorder", "big")
    with pytest.raises(EngineError, match="little-endian"):
        decode(data)


# ---------------------------------------------------------------- reading refuses: every change


def test_every_truncation_and_extension() -> None:
    data = contents(mlp())
    for n in range(len(data)):
        with pytest.raises(EngineError):
            decode(data[:n])
    with pytest.raises(EngineError, match="longer than it says"):
        decode(data + b"\0")


@pytest.mark.slow
def test_a_flip_in_every_byte() -> None:
    data = bytearray(contents(mlp()))
    rng = random.Random(0)
    for i in range(len(data)):
        bit = 1 << rng.randrange(8)
        data[i] ^= bit
        with pytest.raises(EngineError):
            decode(bytes(data))
        data[i] ^= bit
    decode(bytes(data))


def test_unverified_reading_checks_the_header_alone() -> None:
    data = bytearray(contents(mlp()))
    data[-1] ^= 1
    with pytest.raises(EngineError, match="blob 2 of 3 is corrupt"):
        decode(bytes(data))
    decode(bytes(data), verify=False)
    data[fmt.HEADER_AT + 20] ^= 1
    with pytest.raises(EngineError, match="header is corrupt"):
        decode(bytes(data), verify=False)


def test_bytes_between_blobs_must_be_zero() -> None:
    data = bytearray(contents(mlp()))
    (length,) = struct.unpack_from("<I", data, 12)
    for at in (fmt.HEADER_AT + length, fmt.PAGE + 160):  # after the header; between the first two blobs
        data[at] = 1
        with pytest.raises(EngineError, match="data between the blobs"):
            decode(bytes(data))
        data[at] = 0
    decode(bytes(data))


# ---------------------------------------------------------------- reading refuses: forged headers


def _set(*path: Any) -> Callable[[Any], None]:
    *keys, last, value = path

    def change(h: Any) -> None:
        for k in keys:
            h = h[k]
        h[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h.pop("meta") and None, "the header must have exactly the keys"),
        (_set("extra", 1), "the header must have exactly the keys .* not .*extra"),
        (_set("blobs", 0, "extra", 1), r"blobs\[0\] must have exactly the keys"),
        (_set("buffers", 0, "extra", 1), r"buffers\[0\] must have exactly the keys"),
        (_set("steps", 0, "extra", 1), r"steps\[0\] must have exactly the keys"),
        (_set("inputs", 0, "extra", 1), r"inputs\[0\] must have exactly the keys"),
        (_set("steps", {}), "steps is not a list"),
        (_set("target", 1), "target is not a text"),
        (_set("target", "x" * (header.NAME_LIMIT + 1)), "target is not a text of at most"),
        (_set("arena_bytes", -1), "arena_bytes is not an integer"),
        (_set("arena_bytes", 1.0), "arena_bytes is not an integer"),
        (_set("arena_bytes", True), "arena_bytes is not an integer"),
        (_set("arena_bytes", 1 << 63), "arena_bytes is not an integer"),
        (_set("blobs", 0, "dtype", "fp99"), r"blobs\[0\].dtype is the unknown element type \'fp99\'"),
        (_set("blobs", 0, "dtype", ["fp32"]), "unknown element type"),
        (_set("blobs", 0, "shape", [5, 9]), "does not have 160 bytes"),
        (_set("blobs", 0, "shape", [-5, -8]), r"blobs\[0\].shape\[0\] is not an integer"),
        (_set("blobs", 0, "shape", [1 << 62, 1 << 62]), "does not have 160 bytes"),
        (_set("blobs", 0, "shape", [1] * 65), r"blobs\[0\].shape has 65 dimensions"),
        (_set("blobs", 0, "shape", ["n", 8]), r"blobs\[0\].shape\[0\] is not an integer"),
        (_set("blobs", 0, "offset", 64), "not where the writer places them"),
        (_set("blobs", 1, "offset", 0), "not where the writer places them"),
        (_set("blobs", 2, "offset", 1 << 61), "not where the writer places them"),
        (_set("blobs", 0, "sha256", "0" * 64), "blob 0 of 3 is corrupt"),
        (_set("blobs", 0, "sha256", None), r"blobs\[0\].sha256 is not a text"),
        (lambda h: h["blobs"].append(h["blobs"][0]) or None, "not where the writer places them"),
        (lambda h: h["blobs"].pop() and None, "not where the writer places them"),
        (_set("blobs", []), "longer than it says|not where the writer places them"),
        (_set("buffers", 0, "shape", [-1, 5]), r"buffers\[0\].shape\[0\] is not an integer"),
        (_set("buffers", 0, "shape", 5), r"buffers\[0\].shape is not a list"),
        (_set("buffers", 1, "blob", 3), "points at blob 3"),
        (_set("buffers", 1, "blob", -1), r"buffers\[1\].blob is not an integer"),
        (_set("buffers", 4, "offset", 0), "its shape is not static"),
        (_set("steps", 0, "inputs", [0, 99]), "reads buffer 99"),
        (_set("steps", 0, "inputs", [0, -2]), r"steps\[0\].inputs\[1\] is not an integer of -1"),
        (_set("steps", 0, "params", []), r"steps\[0\].params is not a table"),
        (_set("steps", 0, "params", {"$float": "inf"}), r"steps\[0\].params is not a table"),
        (_set("steps", 0, "src", [1]), r"steps\[0\].src\[0\] is not a text"),
        (_set("inputs", 0, "buffer", 99), "input 'x' is buffer 99"),
        (_set("meta", {"$float": "1"}), "malformed float"),
        (_set("meta", {"a": {"$float": "inf", "b": 1}}), "malformed float"),
        (_set("meta", {"$import": "os"}), "unknown \\$ key"),
    ],
)
def test_forged_headers(change: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        decode(forge(contents(mlp()), change))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (lambda t: "", "not JSON"),
        (lambda t: "[]", "the header must have exactly the keys .* not list"),
        (lambda t: t[:-1], "not JSON"),
        (lambda t: t + " ", "not in canonical form"),
        (lambda t: t.replace('"arena_bytes":0', '"arena_bytes":1,"arena_bytes":0'), "not in canonical form"),
        (lambda t: t.replace('"arena_bytes":0', '"arena_bytes":0.0e1'), "not in canonical form"),
        (lambda t: t.replace('"arena_bytes":0', '"arena_bytes":NaN'), "not JSON"),
        (lambda t: t.replace('"arena_bytes":0', '"arena_bytes":' + "9" * 5000), "not JSON"),
        (lambda t: t.replace("fold_constants", "\\ud800"), "not"),
        (lambda t: t.replace("fold_constants", "\ud800"), "not UTF-8"),
        (lambda t: t.replace('"meta":{', '"meta":{"a":' + "[" * 100_000 + "]" * 100_000 + ","), "nested too deeply"),
    ],
)
def test_forged_text(text: Callable[[str], str], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        decode(forge(contents(mlp()), lambda h: None, text))


def test_a_shape_that_numpy_cannot_hold() -> None:
    p = program([("x", F32, (1,))], [("x", 0)], [], constants=[np.empty((0, 3), np.float32)])
    huge = [0, 1 << 62, 1 << 62]

    def change(h: Any) -> None:
        h["blobs"][0]["shape"] = huge
        h["buffers"][1]["shape"] = huge

    with pytest.raises(EngineError, match="cannot be made"):
        decode(forge(contents(p), change))


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from(
        [0, 1, -1, 1 << 31, 1 << 62, "", "x", "fp32", "reference", "$float", "Relu", [], {}, [0], [1 << 40]]
    ),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.lists(st.integers(-2, 9), max_size=4),
    st.dictionaries(st.text(max_size=4), st.integers(0, 3), max_size=2),
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(data=st.data())
def test_headers_with_any_part_replaced(data: st.DataObject) -> None:
    """Any change of a header with right checksums gives a typed error, or an engine that runs or gives the reason."""

    def change(h: Any) -> Any:
        for _ in range(data.draw(st.integers(1, 3))):
            at = h
            while True:
                keys = sorted(at) if isinstance(at, dict) else list(range(len(at)))
                if not keys:
                    break
                k = data.draw(st.sampled_from(keys))
                if isinstance(at[k], (dict, list)) and at[k] and data.draw(st.integers(0, 9)):
                    at = at[k]
                    continue
                action = data.draw(st.sampled_from(["replace", "remove", "copy"]))
                if action == "replace":
                    at[k] = data.draw(JUNK)
                elif action == "remove":
                    del at[k]
                elif isinstance(at, list):
                    at.append(copy.deepcopy(at[k]))
                break
        return h

    source = mlp() if data.draw(st.booleans()) else everything()
    try:
        program = decode(forge(contents(source), change), verify=data.draw(st.booleans()))
        if program.arena_bytes < 1 << 20:
            engine = Engine(program)
            feeds = {
                s.name: np.zeros([d if isinstance(d, int) and d < 8 else 2 for d in s.shape], s.dtype)
                for s in engine.inputs
            }
            engine.run(feeds)
    except OptdnnError:
        pass


def test_reading_allocates_no_more_than_the_file_deserves() -> None:
    """A header that declares huge sizes is refused before memory of that size is allocated."""
    data = contents(mlp())
    forged = [
        forge(data, _set("blobs", 0, "shape", [1 << 40])),
        forge(data, _set("blobs", 0, "length", 1 << 40)),
        forge(data, _set("buffers", 4, "shape", [1 << 40, 1 << 20])),
        forge(data, _set("arena_bytes", 1 << 45)),
        data[:12] + struct.pack("<I", 0xFFFFFFFF) + data[16:],
        data[:16] + struct.pack("<Q", 1 << 60) + data[24:],
    ]
    tracemalloc.start()
    try:
        for f in forged:
            with contextlib.suppress(EngineError):
                decode(f)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_header_is_seen_before_the_blobs_are_verified(tmp_path: Path) -> None:
    path, seen = tmp_path / "e", list[Any]()
    fmt.write(mlp(), path)
    fmt.read(path, seen=lambda program: seen.append((program.target, len(program.blobs))))
    assert seen == [("reference", 0)]
    assert fmt.read(path).digests[0][1] == hashlib.sha256(mlp().blobs[0].tobytes()).digest()
    assert fmt.read(path, verify=False).digests == ()
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(EngineError, match="corrupt"):
        fmt.read(path, seen=lambda program: seen.append((program.target, 0)))
    assert len(seen) == 2
    damaged[100] ^= 1  # of the header
    path.write_bytes(damaged)
    with pytest.raises(EngineError, match="header"):
        fmt.read(path, seen=lambda program: seen.append((program.target, 0)))
    assert len(seen) == 2
