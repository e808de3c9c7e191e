"""The header of an engine file: a program as canonical JSON, and the strict way back.

Every key, type, count and range is checked; whatever :func:`header_text` cannot have written is an EngineError. The
references between the parts (buffer and blob numbers) are left to :func:`optdnn.runtime.program.validate`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optdnn.errors import EngineError, InternalError
from optdnn.ranges import DimRange, Profile
from optdnn.runtime.cuda.kernel_text.allowed import check_names
from optdnn.runtime.program import Buffer, ByValue, Dynamic, Kernel, Plain, Program, Slot, Source, Step
from optdnn.types import DTYPES, DType, TensorSpec, dtype_name

NAME_LIMIT = 1 << 16
"""Longest text, in characters."""
SOURCE_LIMIT = 1 << 22
"""Longest generated source of a kernel, in characters."""
RANK_LIMIT = 64
"""Most dimensions of a tensor (NumPy's own limit)."""
SIZE_LIMIT = 1 << 62
"""Largest size."""
CPU_LIBRARIES = frozenset({"onnxruntime", "openvino"})
"""Executors whose steps hold a network for a CPU library."""


@dataclass(frozen=True)
class BlobEntry:
    """What the header says of one blob; ``offset`` counts from the start of the data."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    length: int
    sha256: str


# ---------------------------------------------------------------- writing


def header_text(program: Program, blobs: Sequence[BlobEntry]) -> str:
    """The header of a valid program. Raises InternalError for params or meta that are not plain data."""
    table = [
        {
            "dtype": dtype_name(b.dtype),
            "length": b.length,
            "offset": b.offset,
            "sha256": b.sha256,
            "shape": list(b.shape),
        }
        for b in blobs
    ]
    return canonical({**_program_to_plain(program), "blobs": table})


def _program_to_plain(program: Program) -> dict[str, Plain]:
    """Everything but the blobs."""
    return {
        "arena_bytes": program.arena_bytes,
        "buffers": [
            {
                "blob": b.blob,
                "dtype": dtype_name(b.dtype),
                "name": b.name,
                "offset": b.offset,
                "shape": None if b.shape is None else list(b.shape),
            }
            for b in program.buffers
        ],
        "inputs": [_port_to_plain(spec, i) for spec, i in program.inputs],
        "meta": to_json(program.meta, "meta"),
        "outputs": [_port_to_plain(spec, i) for spec, i in program.outputs],
        "precision": program.precision,
        "requires": list(program.requires),
        "steps": [
            {
                "executor": s.executor,
                "inputs": list(s.inputs),
                "outputs": list(s.outputs),
                "params": to_json(s.params, f"step {k}"),
                "src": list(s.src),
            }
            for k, s in enumerate(program.steps)
        ],
        "target": program.target,
        **({"kernels": [_kernel_to_plain(k) for k in program.kernels]} if program.kernels else {}),
        **({"lanes": [[s.lane, *s.after] for s in program.lanes]} if program.lanes else {}),
        **({"profiles": [_profile_to_plain(p) for p in program.profiles]} if program.profiles else {}),
        **({"dynamic": _dynamic_to_plain(program.dynamic)} if program.dynamic is not None else {}),
        **({"by_value": _by_value_to_plain(program.by_value)} if program.by_value is not None else {}),
        **({"retained": list(program.retained)} if program.retained else {}),
    }


def _dynamic_to_plain(d: Dynamic) -> dict[str, Plain]:
    source = d.source
    return {
        "arena_bytes": d.arena_bytes,
        "inputs": [_spec_to_plain(s) for s in d.inputs],
        "outputs": [_spec_to_plain(s) for s in d.outputs],
        "plans": [_program_to_plain(p) for p in d.plans],
        "source": None if source is None else _source_to_plain(source),
    }


def _by_value_to_plain(v: ByValue) -> dict[str, Plain]:
    return {"inputs": list(v.inputs), "source": _source_to_plain(v.source)}


def _source_to_plain(source: Source) -> dict[str, Plain]:
    return {
        "model": source.model,
        "options": to_json(source.options, "options"),
        "weights": to_json(source.weights, "weights"),
        **({} if source.calibration is None else {"calibration": source.calibration}),
    }


def _kernel_to_plain(k: Kernel) -> dict[str, Plain]:
    return {
        "arch": k.arch,
        "cubin": k.cubin,
        "function": k.function,
        "generated": dict(k.generated),
        "options": list(k.options),
        "source": k.source,
        "template": k.template,
    }


def _profile_to_plain(p: Profile) -> dict[str, Plain]:
    return {name: [r.min, r.opt, r.max] for name, r in p.items()}


def _port_to_plain(spec: TensorSpec, buffer: int) -> dict[str, Plain]:
    return {"buffer": buffer, **_spec_to_plain(spec)}


def _spec_to_plain(spec: TensorSpec) -> dict[str, Plain]:
    return {"dtype": dtype_name(spec.dtype), "name": spec.name, "shape": list(spec.shape)}


def canonical(value: Plain) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def to_json(value: Plain, where: str) -> Plain:
    """Plain data as JSON can hold it. Raises InternalError for anything that is not plain (a tuple, a NumPy scalar)."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        if -SIZE_LIMIT <= value <= 2 * SIZE_LIMIT:
            return value
        raise InternalError(f"{where} holds the integer {value}, which is too large for an engine file")
    if kind is float:
        # str() gives "inf", "-inf", "nan": what float() reads
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is list:
        return [to_json(x, where) for x in value]
    if isinstance(value, Mapping):
        if any(type(k) is not str for k in value):
            raise InternalError(f"{where} holds a table whose keys are not text")
        return {f"${k}" if k.startswith("$") else k: to_json(x, f"{where}.{k}") for k, x in value.items()}
    raise InternalError(f"{where} holds a {kind.__name__}, which is not plain data")


def from_json(value: Plain) -> Plain:
    """The inverse of :func:`to_json`. Raises EngineError for a "$" key that it does not write."""
    if isinstance(value, list):
        return [from_json(x) for x in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        if len(value) != 1 or value["$float"] not in ("inf", "-inf", "nan"):
            raise EngineError(f"the header holds a malformed float, {value!r:.60}")
        return float(value["$float"])
    if any(k.startswith("$") and not k.startswith("$$") for k in value):
        raise EngineError("the header holds an unknown $ key")
    return {k[1:] if k.startswith("$") else k: from_json(x) for k, x in value.items()}


# ---------------------------------------------------------------- reading


def parse_header(text: str, minor: int) -> tuple[Program, list[BlobEntry]]:
    """The program (its list of blobs still empty) and the table of its blobs. Raises EngineError.

    ``minor`` is the file's: 1.1 added "kernels", 1.2 "profiles" and "dynamic", 1.3 "by_value", 1.4 "lanes", 1.5
    "retained", 1.6 keys inside of steps and sources; a program is written in the oldest format that holds it.
    """
    try:
        parsed = json.loads(text)
        if canonical(parsed) != text:
            raise EngineError("the header is not in canonical form")
        if not isinstance(parsed, dict):
            _table(parsed, _HEADER_KEYS, "the header")
        blobs = parsed.pop("blobs", None)
        program = _program(parsed, minor, '"$' in text)
        if minor != minor_of(program):
            raise EngineError(f"the file says that it is of format 1.{minor}; its header is of 1.{minor_of(program)}")
        return program, [_blob(b) for b in _list(blobs, "the table of blobs")]
    except RecursionError as e:
        raise EngineError("the header is nested too deeply") from e
    except ValueError as e:
        raise EngineError(f"the header is not JSON: {e}") from e


def _program(value: Any, minor: int, escaped: bool, where: str = "the header") -> Program:
    present = set(value) if isinstance(value, dict) else set()
    optional = {key for key, since in OPTIONAL_KEYS.items() if since <= minor} & present
    h = _table(value, _HEADER_KEYS | optional, where)
    for key in sorted(optional):
        if not h[key]:
            raise EngineError(f"{where}'s table of {key} is empty")
    return Program(
        target=_text(h["target"], "target"),
        precision=_text(h["precision"], "precision"),
        inputs=tuple(_port(p, "input") for p in _list(h["inputs"], "inputs")),
        outputs=tuple(_port(p, "output") for p in _list(h["outputs"], "outputs")),
        buffers=tuple(_buffer(b) for b in _list(h["buffers"], "buffers")),
        steps=tuple(_step(s, escaped) for s in _list(h["steps"], "steps")),
        blobs=[],
        arena_bytes=_size(h["arena_bytes"], "arena_bytes"),
        requires=tuple(_text(r, "requirement") for r in _list(h["requires"], "requires")),
        meta=_plain_table(h["meta"], "meta", escaped),
        kernels=tuple(_kernel(k) for k in _list(h.get("kernels", []), "kernels")),
        profiles=tuple(_profile(p) for p in _list(h.get("profiles", []), "profiles")),
        dynamic=_dynamic(h["dynamic"], minor, escaped) if "dynamic" in optional else None,
        by_value=_by_value(h["by_value"], escaped) if "by_value" in optional else None,
        lanes=tuple(_slot(s) for s in _list(h.get("lanes", []), "lanes")),
        retained=tuple(_size(i, "a retained buffer") for i in _list(h.get("retained", []), "retained")),
    )


def _dynamic(value: Any, minor: int, escaped: bool) -> Dynamic:
    d = _table(value, _DYNAMIC_KEYS, "the header's dynamic part")
    source = None if d["source"] is None else _source(d["source"], escaped)
    return Dynamic(
        tuple(_spec(p, "input") for p in _list(d["inputs"], "inputs")),
        tuple(_spec(p, "output") for p in _list(d["outputs"], "outputs")),
        tuple(_program(p, minor, escaped, "a plan") for p in _list(d["plans"], "plans")),
        source,
        _size(d["arena_bytes"], "arena_bytes"),
    )


def _by_value(value: Any, escaped: bool) -> ByValue:
    v = _table(value, _BY_VALUE_KEYS, "the header's plans by value")
    return ByValue(tuple(_text(n, "an input") for n in _list(v["inputs"], "inputs")), _source(v["source"], escaped))


def _source(value: Any, escaped: bool) -> Source:
    extra = {"calibration"} & set(value) if isinstance(value, dict) else set()
    s = _table(value, _SOURCE_KEYS | extra, "the model in the engine")
    weights = _plain_table(s["weights"], "weights", escaped)
    return Source(
        _size(s["model"], "the blob of the model"),
        {_text(n, "a weight's name"): _size(b, f"the blob of {n!r}") for n, b in weights.items()},
        _plain_table(s["options"], "options", escaped),
        _size(s["calibration"], "the blob of the calibration") if extra else None,
    )


def _blob(value: Any) -> BlobEntry:
    b = _table(value, _BLOB_KEYS, "a blob")
    dtype = _dtype(b["dtype"], "a blob")
    shape = tuple(_size(d, "a blob's dimension") for d in _dims(b["shape"], "a blob"))
    length = _size(b["length"], "a blob's length")
    if length != math.prod(shape) * dtype.itemsize:
        raise EngineError(f"a blob of {dtype}{list(shape)} does not have {length} bytes")
    return BlobEntry(dtype, shape, _size(b["offset"], "a blob's offset"), length, _text(b["sha256"], "a checksum"))


def _port(value: Any, what: str) -> tuple[TensorSpec, int]:
    p = dict(_table(value, _PORT_KEYS, f"an {what}"))
    buffer = p.pop("buffer")
    spec = _spec(p, what)
    return spec, _size(buffer, f"buffer of {spec.name!r}")


def _spec(value: Any, what: str) -> TensorSpec:
    p = _table(value, _SPEC_KEYS, f"an {what}")
    name = _text(p["name"], f"an {what}'s name")
    return TensorSpec(name, _dtype(p["dtype"], name), _shape(p["shape"], name))


def _buffer(value: Any) -> Buffer:
    b = _table(value, _BUFFER_KEYS, "a buffer")
    name = _text(b["name"], "a buffer's name")
    return Buffer(
        name,
        _dtype(b["dtype"], name),
        None if b["shape"] is None else _shape(b["shape"], name),
        None if b["blob"] is None else _size(b["blob"], f"blob of {name!r}"),
        None if b["offset"] is None else _size(b["offset"], f"offset of {name!r}"),
    )


def _step(value: Any, escaped: bool) -> Step:
    s = _table(value, _STEP_KEYS, "a step")
    return Step(
        _text(s["executor"], "an executor"),
        _plain_table(s["params"], "params", escaped),
        tuple(_size(i, "a step's input", -1) for i in _list(s["inputs"], "a step's inputs")),
        tuple(_size(i, "a step's output", -1) for i in _list(s["outputs"], "a step's outputs")),
        tuple(_text(n, "a node's name") for n in _list(s["src"], "a step's nodes")),
    )


def _kernel(value: Any) -> Kernel:
    k = _table(value, _KERNEL_KEYS, "a kernel")
    generated = k["generated"]
    if not isinstance(generated, dict) or not all(
        isinstance(v, str) and len(v) <= SOURCE_LIMIT for v in generated.values()
    ):
        raise EngineError("a kernel's generated sources are not texts")
    kernel = Kernel(
        _text(k["template"], "a kernel's template"),
        _text(k["function"], "a kernel's function"),
        _text(k["arch"], "a kernel's architecture"),
        dict(generated),
        tuple(_text(o, "a kernel's option") for o in _list(k["options"], "a kernel's options")),
        _text(k["source"], "a kernel's digest"),
        None if k["cubin"] is None else _size(k["cubin"], "a kernel's cubin"),
    )
    return check_names(kernel)


def _slot(value: Any) -> Slot:
    lane, *after = (
        _size(n, "a step's place in the lanes") for n in (_list(value, "a step's place in the lanes") or [None])
    )
    return Slot(lane, tuple(after))


def _profile(value: Any) -> Profile:
    if not isinstance(value, dict):
        raise EngineError("a profile is not a table")
    found = {}
    for name, numbers in value.items():
        low, opt, high = (_size(n, f"the range of {name!r}") for n in (*_list(numbers, "a range"), -1, -1, -1)[:3])
        if len(numbers) != 3 or not low <= opt <= high:
            raise EngineError(f"the range of {name!r} is not one: {numbers!s:.60}")
        found[_text(name, "a symbol")] = DimRange(low, opt, high)
    return found


OPTIONAL_KEYS = {"kernels": 1, "profiles": 2, "dynamic": 2, "by_value": 3, "lanes": 4, "retained": 5}
"""Key of the header -> the minor version that added it."""


def minor_of(program: Program) -> int:
    """The oldest minor version of the format that holds a program."""
    own = max((since for key, since in OPTIONAL_KEYS.items() if getattr(program, key)), default=0)
    plans = program.dynamic.plans if program.dynamic is not None else ()
    return max([own, 6 if _has_additions_of_6(program) else 0, *map(minor_of, plans)])


def _has_additions_of_6(program: Program) -> bool:
    """Whether a program holds what 1.6 added inside of steps and sources: what a launch waits for, inputs of a library that may be
    empty, shapes of the values of a body, calibration."""
    holders = (program.dynamic, program.by_value)
    sources = [h.source for h in holders if h is not None and h.source is not None]
    if any(s.calibration is not None for s in sources):
        return True
    for step in program.steps:
        launch = step.params.get("launch")
        if isinstance(launch, Mapping) and "waits" in launch:
            return True
        if (step.executor in CPU_LIBRARIES and "empty" in step.params) or _has_typed_body(step.params):
            return True
    return False


def _has_typed_body(value: Plain) -> bool:
    """Whether plain attributes (:mod:`optdnn.runtime.attrs`) hold a body of If, Loop or Scan with the shapes of its values."""
    if isinstance(value, Mapping):
        body = value.get("graph")
        if len(value) == 1 and isinstance(body, list) and len(body) > 4:
            return True
        return any(map(_has_typed_body, value.values()))
    return isinstance(value, list) and any(map(_has_typed_body, value))


_HEADER_KEYS = frozenset(
    ("arena_bytes", "buffers", "inputs", "meta", "outputs", "precision", "requires", "steps", "target")
)
_BLOB_KEYS = frozenset(("dtype", "length", "offset", "sha256", "shape"))
_BUFFER_KEYS = frozenset(("blob", "dtype", "name", "offset", "shape"))
_KERNEL_KEYS = frozenset(("arch", "cubin", "function", "generated", "options", "source", "template"))
_SPEC_KEYS = frozenset(("dtype", "name", "shape"))
_PORT_KEYS = _SPEC_KEYS | {"buffer"}
_DYNAMIC_KEYS = frozenset(("arena_bytes", "inputs", "outputs", "plans", "source"))
_BY_VALUE_KEYS = frozenset(("inputs", "source"))
_SOURCE_KEYS = frozenset(("model", "options", "weights"))
_STEP_KEYS = frozenset(("executor", "inputs", "outputs", "params", "src"))


def _table(value: Any, keys: frozenset[str], where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() != keys:
        found = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise EngineError(f"{where} must have exactly the keys {sorted(keys)}, not {found!s:.200}")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise EngineError(f"{where} is not a list")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or len(value) > NAME_LIMIT:
        raise EngineError(f"{where} is not a text of at most {NAME_LIMIT} characters")
    return value


def _size(value: Any, where: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= SIZE_LIMIT:
        raise EngineError(f"{where} is not an integer of {least} to {SIZE_LIMIT}")
    return value


def _dims(value: Any, where: str) -> list[Any]:
    dims = _list(value, f"the shape of {where}")
    if len(dims) > RANK_LIMIT:
        raise EngineError(f"the shape of {where} has {len(dims)} dimensions")
    return dims


def _shape(value: Any, name: str) -> tuple[int | str, ...]:
    return tuple(
        _text(d, "a dimension") if isinstance(d, str) else _size(d, f"a dimension of {name!r}")
        for d in _dims(value, name)
    )


def _dtype(value: Any, name: str) -> DType:
    if not isinstance(value, str) or value not in DTYPES:
        raise EngineError(f"{name} has the unknown element type {value!r:.60}")
    return DTYPES[value]


def _plain_table(value: Any, where: str, escaped: bool) -> dict[str, Plain]:
    if not isinstance(value, dict):
        raise EngineError(f"{where} is not a table")
    table: dict[str, Plain] = from_json(value) if escaped else value
    if not isinstance(table, dict):
        raise EngineError(f"{where} is not a table")
    return table
