"""The engine file: what goes in comes out, and nothing but what the writer writes is read."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import random
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
from programs import F32, mlp, mlp_expected, program

from optdnn import Engine, load
from optdnn.errors import EngineError, InternalError, OptdnnError, OutputError, UnsupportedError
from optdnn.runtime.file import format as fmt
from optdnn.runtime.file import header
from optdnn.runtime.program import Buffer, ByValue, Dynamic, Program, Source, Step
from optdnn.runtime.reference.nested import PlainGraph
from optdnn.runtime.reference.run import PlainStage
from optdnn.runtime.steps.reference import prepare, reference_step
from optdnn.types import DTYPES

X = np.random.default_rng(0).standard_normal((2, 5)).astype(np.float32)


def contents(p: Program) -> bytes:
    return b"".join(fmt.encode(p))


def decode(data: bytes, **options: Any) -> Program:
    return fmt.decode(memoryview(data), **options)


def header_of(data: bytes) -> Any:
    (length,) = struct.unpack_from("<I", data, 12)
    return json.loads(data[fmt.HEADER_AT : fmt.HEADER_AT + length])


def forge(data: bytes, change: Callable[[Any], Any], text: Callable[[str], str] | None = None) -> bytes:
    """The file with its header changed and every length and checksum of the prefix set right again."""
    (length,) = struct.unpack_from("<I", data, 12)
    start = fmt.HEADER_AT + length
    blobs = data[-(-start // fmt.PAGE) * fmt.PAGE :] if start < len(data) else b""
    h = header_of(data)
    h = change(h) or h
    new = header.canonical(h) if text is None else text(header.canonical(h))
    raw = new.encode("utf-8", "surrogatepass")
    end = fmt.HEADER_AT + len(raw)
    at = -(-end // fmt.PAGE) * fmt.PAGE if h.get("blobs") else end
    version = struct.unpack_from("<HH", data, 8)
    prefix = fmt.PREFIX.pack(fmt.MAGIC, *version, len(raw), at + len(blobs), 0)
    return prefix + hashlib.sha256(prefix + raw).digest() + raw + bytes(at - end) + blobs


# ---------------------------------------------------------------- round trips


def everything() -> Program:
    """A program with every kind of blob, name, attribute and number that a file can hold."""
    rng = np.random.default_rng(3)
    blobs = [(rng.standard_normal((3, 2)) * 4).astype(d) for n, d in DTYPES.items() if n != "bool"]
    blobs += [
        np.array([True, False]),
        np.float32(7).reshape(()),
        np.empty((0, 3), np.int8),
        np.asfortranarray(np.eye(3)),
    ]
    blobs += [np.arange(20_000, dtype=np.int64), np.ones(1, np.int8)]  # a large one, on its own page
    attrs = {
        "axes": (0, -1),
        "to": DTYPES["bf16"],
        "value": np.array([1.5, np.inf], DTYPES["fp16"]),
        "low": -np.inf,
        "nested": ((1, 2), ()),
        "none": None,
        "epilogue": (PlainStage("Clip", (-1, None, 2), {"alpha": 0.1}),),
    }
    p = program(
        [("Eingabe ä/:0\n☃", F32, ("batch size + 1", 3)), ("empty", np.int64, ())],
        [("y", 2 + len(blobs))],
        [reference_step("Relu", attrs, (0, -1), (2 + len(blobs), -1), ("nœud", 'quo"te'))],
        [(F32, ("batch size + 1", 3))],
        blobs,
        requires=("package:numpy",),
        arena_bytes=4096,
        meta={
            "$key": {"$$": [float("inf"), float("-inf"), -0.0, 1e-300, 2**62, None, True, "$float"]},
            "nan": float("nan"),
            "": [],
        },
    )
    p.buffers = (*p.buffers, Buffer("scratch", F32, (16, 64), offset=0), Buffer("unknown rank", F32, None))
    return p


@pytest.mark.parametrize("mmap", [True, False])
def test_round_trip(tmp_path: Path, mmap: bool) -> None:
    p = everything()
    fmt.write(p, tmp_path / "e")
    q = fmt.read(tmp_path / "e", mmap=mmap)
    assert contents(q) == contents(p) == (tmp_path / "e").read_bytes()
    for name in ("target", "precision", "inputs", "outputs", "buffers", "arena_bytes", "requires"):
        assert getattr(q, name) == getattr(p, name)
    assert repr(q.meta["nan"]) == "nan"
    assert q.meta["$key"] == p.meta["$key"]
    assert str(q.meta["$key"]["$$"][2]) == "-0.0"
    assert q.steps[0].src == p.steps[0].src
    for a, b in zip(q.blobs, p.blobs, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert a.tobytes() == np.ascontiguousarray(b).tobytes()
        assert not a.flags.writeable


def test_attributes_come_back_as_they_were() -> None:
    p = decode(contents(everything()))
    attrs = prepare(p.steps[0], p, None)._attrs  # type: ignore[arg-type]
    assert attrs["axes"] == (0, -1)
    assert attrs["to"] == DTYPES["bf16"]
    assert attrs["value"].dtype == np.float16
    assert attrs["value"].tolist() == [1.5, np.inf]
    assert attrs["low"] == -np.inf
    assert attrs["nested"] == ((1, 2), ())
    assert attrs["epilogue"] == (PlainStage("Clip", (-1, None, 2), {"alpha": 0.1}),)


def test_attributes_without_a_plain_form_are_refused() -> None:
    for value in (object(), np.zeros(5000), np.zeros(1, np.complex64), {"a": 1}, {1, 2}):
        with pytest.raises(InternalError, match="attribute 'a' is a"):
            reference_step("Relu", {"a": value}, (0,), (1,))


def test_the_same_program_gives_the_same_bytes() -> None:
    assert contents(mlp()) == contents(mlp())
    assert contents(mlp(1)) != contents(mlp())


def test_tables_in_another_order_give_the_same_bytes() -> None:
    a, b = mlp(), mlp()
    a.meta, b.meta = {"x": 1, "y": 2}, {"y": 2, "x": 1}
    assert contents(a) == contents(b)


def test_blobs_are_aligned_and_mapped(tmp_path: Path) -> None:
    fmt.write(everything(), tmp_path / "e")
    for a in fmt.read(tmp_path / "e").blobs:
        if a.size:
            assert a.ctypes.data % (fmt.PAGE if a.nbytes >= fmt.LARGE else fmt.LINE) == 0
            with pytest.raises(ValueError, match="read-only"):
                a[...] = 0
            with pytest.raises(ValueError, match="WRITEABLE"):
                a.flags.writeable = True


def test_an_engine_survives_the_replacement_of_its_file(tmp_path: Path) -> None:
    Engine(mlp()).save(tmp_path / "e")
    engine = load(tmp_path / "e")
    Engine(mlp(seed=1)).save(tmp_path / "e")
    np.testing.assert_array_equal(engine.run({"x": X})["y"], mlp_expected(mlp(), X)["y"])
    np.testing.assert_array_equal(load(tmp_path / "e").run({"x": X})["y"], mlp_expected(mlp(1), X)["y"])


def test_a_program_without_blobs_has_no_data() -> None:
    p = program([("x", F32, (1,))], [("y", 1)], [reference_step("Relu", {}, (0,), (1,))], [(F32, (1,))])
    data = contents(p)
    assert contents(decode(data)) == data
    with pytest.raises(EngineError, match="longer than it says"):
        decode(data + b"\0")


def test_many_large_blobs_are_digested_by_threads() -> None:
    blobs = [memoryview(os.urandom(300_000 + i)) for i in range(8)]
    assert fmt.digests(blobs) == [hashlib.sha256(b).hexdigest() for b in blobs]


# ---------------------------------------------------------------- writing refuses


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ((1, 2), "meta.k holds a tuple, which is not plain data"),
        (np.float32(1), "meta.k holds a float32"),
        ({1: 2}, "meta.k holds a table whose keys are not text"),
        (2**80, "meta.k holds the integer"),
        (b"x", "meta.k holds a bytes"),
        ("\ud800", "text that is not Unicode"),
    ],
)
def test_what_is_not_plain_is_not_written(value: Any, message: str) -> None:
    p = mlp()
    p.meta = {"k": value}
    with pytest.raises(InternalError, match=message):
        contents(p)


def test_an_invalid_program_is_not_written() -> None:
    p = mlp()
    p.steps = ()
    with pytest.raises(InternalError, match="the program is not valid: nothing writes output 'y'"):
        contents(p)


def test_a_blob_of_an_unknown_type_is_not_written() -> None:
    p = program([("x", F32, (1,))], [("x", 0)], [], constants=[np.zeros(2, "U3")])
    with pytest.raises(InternalError, match="a blob has element type <U3"):
        contents(p)


def test_a_header_beyond_the_limit_is_neither_written_nor_read(monkeypatch: pytest.MonkeyPatch) -> None:
    data = contents(mlp())
    monkeypatch.setenv("OPTDNN_MAX_HEADER_BYTES", "100")
    with pytest.raises(UnsupportedError, match=r"header would take \d+ bytes\n  hint: the limit is 100 bytes"):
        contents(mlp())
    with pytest.raises(EngineError, match=r"the header has \d+ bytes\n  hint: .*OPTDNN_MAX_HEADER_BYTES=N"):
        fmt.decode(memoryview(data))


# ---------------------------------------------------------------- atomic saving


def test_unwritable_places_are_output_errors(tmp_path: Path) -> None:
    engine = Engine(mlp())
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for path, message in (
        (tmp_path / "missing" / "e", "No such file or directory"),
        (tmp_path / "file" / "e", "Not a directory"),
        (tmp_path / "folder", "not a regular file"),
        (tmp_path / ("n" * 300), "File name too long"),
        (Path("/dev/null"), "not a regular file"),
    ):
        with pytest.raises(OutputError, match=message):
            engine.save(path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_failing_save_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    engine = Engine(mlp())
    engine.save(tmp_path / "e")
    before = (tmp_path / "e").read_bytes()

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    def pieces(p: Program) -> Any:
        yield b"partial"
        full()

    with monkeypatch.context() as m:
        if step == "write":
            m.setattr(fmt, "encode", pieces)
        else:
            m.setattr(os, step, full)
        with pytest.raises(OutputError, match=r"e cannot be written: No space left on device\n  hint:"):
            Engine(mlp(1)).save(tmp_path / "e")
    assert [p.name for p in tmp_path.iterdir()] == ["e"]
    assert (tmp_path / "e").read_bytes() == before


def test_an_interrupted_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Engine(mlp()).save(tmp_path / "e")
    assert not list(tmp_path.iterdir())


def test_a_read_only_file_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "e").write_text("precious")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the superuser may write anything
    with pytest.raises(OutputError, match="read-only"):
        Engine(mlp()).save(tmp_path / "e")
    assert (tmp_path / "e").read_text() == "precious"


def test_saving_follows_links_and_honours_the_umask(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    old = os.umask(0o027)
    try:
        Engine(mlp()).save(tmp_path / "link")
    finally:
        os.umask(old)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o640
    assert len(load(tmp_path / "real").inputs) == 1


# ---------------------------------------------------------------- reading refuses: files


def test_files_that_are_no_engines(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "short").write_bytes(fmt.MAGIC)
    (tmp_path / "net.onnx").write_bytes(b"\x08\x07\x12\x07pytorch" + bytes(100))
    (tmp_path / "crlf").write_bytes(contents(mlp()).replace(b"\n", b"\r\n", 1))
    for name, message in (
        ("none", "there is no engine file"),
        ("fifo", "not a regular file"),
        (".", "cannot be read"),
        ("empty", "truncated: 0 bytes"),
        ("short", "truncated: 8 bytes"),
        ("net.onnx", r"is not an optdnn engine\n  hint: it is a model: optdnn build "),
        ("crlf", "is not an optdnn engine"),
    ):
        with pytest.raises(EngineError, match=message):
            load(tmp_path / name)


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
        (_set("blobs", 0, "offset", 64), "do not fill the file"),
        (_set("blobs", 1, "offset", 0), "do not fill the file"),
        (_set("blobs", 2, "offset", 1 << 61), "do not fill the file"),
        (_set("blobs", 0, "sha256", "0" * 64), "blob 0 of 3 is corrupt"),
        (_set("blobs", 0, "sha256", None), r"blobs\[0\].sha256 is not a text"),
        (lambda h: h["blobs"].append(h["blobs"][0]) or None, "do not fill the file"),
        (lambda h: h["blobs"].pop() and None, "do not fill the file"),
        (_set("blobs", []), "longer than it says|do not fill the file"),
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
    """Whatever one puts anywhere in a header with right checksums: a typed error, or an engine that runs or says why not."""

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
    """A header that declares huge sizes is refused before anything of that size is made."""
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
