"""The header of an engine file: a program as canonical JSON, and its strict parser.

One table gives the form of each part (:data:`PROGRAM` and the forms before it). Writing and reading both follow it. Reading checks
each key, type, count and range. It raises EngineError for anything that :func:`header_text` cannot have written. References between
parts (numbers of buffers and blobs) are checked by :func:`optdnn.runtime.file.validate.validate`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optdnn.errors import EngineError, InternalError
from optdnn.limits import HEADER_NESTING
from optdnn.ranges import DimRange
from optdnn.runtime.file.validate import check_names
from optdnn.runtime.program import (
    Buffer,
    ByValue,
    Dynamic,
    Kernel,
    Plain,
    Program,
    Ranks,
    Slot,
    Source,
    Step,
    programs_of,
)
from optdnn.types import DTYPES, RANK_LIMIT, DType, TensorSpec, dtype_name

NAME_LIMIT = 1 << 16
"""Longest text, in characters."""
SOURCE_LIMIT = 1 << 22
"""Longest generated source of a kernel, in characters."""
SIZE_LIMIT = 1 << 62
"""Largest size."""
CPU_LIBRARIES = frozenset({"onnxruntime", "openvino"})
"""Executors whose steps contain a network for a CPU library."""
HEADER = "the header"


@dataclass(frozen=True)
class BlobEntry:
    """One blob in the header; ``offset`` counts from the start of the data."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    length: int
    sha256: str


def header_text(program: Program, blobs: Sequence[BlobEntry]) -> str:
    """The header of a valid program. Raises InternalError for params or meta that are not plain data."""
    return canonical({**PROGRAM.write(program, HEADER), "blobs": BLOBS.write(blobs, "blobs")})


def parse_header(text: str, minor: int) -> tuple[Program, list[BlobEntry]]:
    """The program (its list of blobs still empty) and the table of its blobs. Raises EngineError.

    ``minor`` is the file's minor version, which must be the oldest that can hold the program (:func:`minor_of`).
    """
    try:
        parsed = json.loads(text)
        _check_nesting(parsed)
        if canonical(parsed) != text:
            raise EngineError("the header is not in canonical form")
        escaped = '"$' in text
        blobs = parsed.pop("blobs", None) if isinstance(parsed, dict) else None
        program = PROGRAM.read(parsed, HEADER, escaped)
        if minor != minor_of(program):
            raise EngineError(f"the file says that it is of format 1.{minor}; its header is of 1.{minor_of(program)}")
        return program, list(BLOBS.read(blobs, "blobs", escaped))
    except RecursionError as e:
        raise EngineError("the header is nested too deeply") from e
    except ValueError as e:
        raise EngineError(f"the header is not JSON: {e}") from e


def _check_nesting(parsed: Plain) -> None:
    """Raise EngineError for lists and tables that are nested too deeply: they are read recursively."""
    level, depth = [parsed], 0
    while level:
        inner = [x if isinstance(x, list) else x.values() for x in level if isinstance(x, (list, dict))]
        level, depth = [y for x in inner for y in x], depth + 1
        if depth > HEADER_NESTING.value + 1:
            raise EngineError("the header is nested too deeply", hint=HEADER_NESTING.hint)


def canonical(value: Plain) -> str:
    """The canonical JSON text of a value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


# ---------------------------------------------------------------- forms


@dataclass(frozen=True)
class Form:
    """The form of values of one kind in the header.

    ``write(value, where)`` returns plain data. ``read(plain, where, escaped)`` is the inverse: it raises EngineError, which names
    the place ``where``, for anything that ``write`` does not return. ``escaped``: the header has keys that begin with "$".
    """

    write: Callable[[Any, str], Plain]
    read: Callable[[Any, str, bool], Any]


def leaf(read: Callable[[Any, str], Any], write: Callable[[Any], Plain] = lambda value: value) -> Form:
    """A form of values without parts."""
    return Form(lambda value, where: write(value), lambda plain, where, escaped: read(plain, where))


def text(limit: int = NAME_LIMIT) -> Form:
    def read(plain: Any, where: str) -> str:
        if not isinstance(plain, str) or len(plain) > limit:
            raise EngineError(f"{where} is not a text of at most {limit} characters")
        return plain

    return leaf(read)


def integer(least: int = 0) -> Form:
    def read(plain: Any, where: str) -> int:
        if type(plain) is not int or not least <= plain <= SIZE_LIMIT:
            raise EngineError(f"{where} is not an integer of {least} to {SIZE_LIMIT}")
        return plain

    return leaf(read)


def list_of(form: Form) -> Form:
    def read(plain: Any, where: str, escaped: bool) -> tuple[Any, ...]:
        if not isinstance(plain, list):
            raise EngineError(f"{where} is not a list")
        return tuple(form.read(x, f"{where}[{k}]", escaped) for k, x in enumerate(plain))

    return Form(lambda value, where: [form.write(x, f"{where}[{k}]") for k, x in enumerate(value)], read)


def table_of(form: Form) -> Form:
    """A mapping with names as keys."""

    def read(plain: Any, where: str, escaped: bool) -> dict[str, Any]:
        if not isinstance(plain, dict):
            raise EngineError(f"{where} is not a table")
        return {
            TEXT.read(n, f"a key of {where}", escaped): form.read(x, f"{where}.{n}", escaped) for n, x in plain.items()
        }

    return Form(lambda value, where: {n: form.write(x, f"{where}.{n}") for n, x in value.items()}, read)


def or_none(form: Form) -> Form:
    return Form(
        lambda value, where: None if value is None else form.write(value, where),
        lambda plain, where, escaped: None if plain is None else form.read(plain, where, escaped),
    )


def record(make: Callable[..., Any], fields: Mapping[str, Form], optional: Mapping[str, Form] | None = None) -> Form:
    """A table with exactly these fields. Fields in ``optional`` are absent if they are None or empty."""
    forms = {**fields, **(optional or {})}
    required, allowed = fields.keys(), forms.keys()

    def write(value: Any, where: str) -> Plain:
        values = {name: getattr(value, name) for name in forms}
        held = {n: v for n, v in values.items() if n in required or v not in (None, ())}
        return {n: forms[n].write(v, _within(where, n)) for n, v in held.items()}

    def read(plain: Any, where: str, escaped: bool) -> Any:
        if not isinstance(plain, dict) or not required <= plain.keys() <= allowed:
            keys = sorted(plain) if isinstance(plain, dict) else type(plain).__name__
            raise EngineError(f"{where} must have exactly the keys {sorted(required)}, not {keys!s:.200}")
        for name in plain.keys() - required:
            if plain[name] in (None, [], {}):
                raise EngineError(f"{where}'s table of {name} is empty")
        return make(**{n: forms[n].read(x, _within(where, n), escaped) for n, x in plain.items()})

    return Form(write, read)


def _within(where: str, name: str) -> str:
    return name if where == HEADER else f"{where}.{name}"


# ---------------------------------------------------------------- plain data of users and executors


def to_json(value: Plain, where: str) -> Plain:
    """Plain data in JSON form: floats that JSON lacks and keys that begin with "$" are escaped.

    Raises InternalError for anything that is not plain (a tuple, a NumPy scalar).
    """
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        if -SIZE_LIMIT <= value <= 2 * SIZE_LIMIT:
            return value
        raise InternalError(f"{where} holds the integer {value}, which is too large for an engine file")
    if kind is float:
        # str() gives "inf", "-inf" or "nan", which float() reads
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind is list:
        return [to_json(x, where) for x in value]
    if isinstance(value, Mapping):
        if any(type(k) is not str for k in value):
            raise InternalError(f"{where} holds a table with keys that are not text")
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


def _read_plain(plain: Any, where: str, escaped: bool) -> dict[str, Plain]:
    table = from_json(plain) if escaped else plain
    if not isinstance(table, dict):
        raise EngineError(f"{where} is not a table")
    return table


# ---------------------------------------------------------------- the table of forms


def _read_dtype(plain: Any, where: str) -> DType:
    if not isinstance(plain, str) or plain not in DTYPES:
        raise EngineError(f"{where} is the unknown element type {plain!r:.60}")
    return DTYPES[plain]


def _shape(dim: Form) -> Form:
    dims = list_of(dim)

    def read(plain: Any, where: str, escaped: bool) -> tuple[int | str, ...]:
        if isinstance(plain, list) and len(plain) > RANK_LIMIT:
            raise EngineError(f"{where} has {len(plain)} dimensions")
        shape: tuple[int | str, ...] = dims.read(plain, where, escaped)
        return shape

    return Form(dims.write, read)


def _blob(**fields: Any) -> BlobEntry:
    blob = BlobEntry(**fields)
    if blob.length != math.prod(blob.shape) * blob.dtype.itemsize:
        raise EngineError(f"a blob of {blob.dtype}{list(blob.shape)} does not have {blob.length} bytes")
    return blob


def _read_slot(plain: Any, where: str, escaped: bool) -> Slot:
    numbers = SIZES.read(plain, where, escaped)
    if not numbers:
        raise EngineError(f"{where} names no lane")
    return Slot(numbers[0], numbers[1:])


def _read_range(plain: Any, where: str, escaped: bool) -> DimRange:
    sizes = SIZES.read(plain, where, escaped)
    if len(sizes) != 3 or list(sizes) != sorted(sizes):
        raise EngineError(f"{where} is not a range: {plain!s:.60}")
    return DimRange(*sizes)


def _port(name: str, dtype: DType, shape: tuple[int | str, ...], buffer: int) -> tuple[TensorSpec, int]:
    return TensorSpec(name, dtype, shape), buffer


TEXT, SIZE = text(), integer()
TEXTS, SIZES = list_of(TEXT), list_of(SIZE)
OPERANDS = list_of(integer(-1))
PLAIN = Form(to_json, _read_plain)
DTYPE = leaf(_read_dtype, dtype_name)
DIM = leaf(lambda plain, where: (TEXT if isinstance(plain, str) else SIZE).read(plain, where, False))
SPEC_FIELDS = {"dtype": DTYPE, "name": TEXT, "shape": _shape(DIM)}
SPEC = record(TensorSpec, SPEC_FIELDS)
SPECS = list_of(SPEC)
PORT = Form(
    lambda port, where: {"buffer": port[1], **SPEC.write(port[0], where)},
    record(_port, {"buffer": SIZE, **SPEC_FIELDS}).read,
)
PORTS = list_of(PORT)
BLOBS = list_of(record(_blob, {"dtype": DTYPE, "length": SIZE, "offset": SIZE, "sha256": TEXT, "shape": _shape(SIZE)}))
BUFFER = record(
    Buffer,
    {"blob": or_none(SIZE), "dtype": DTYPE, "name": TEXT, "offset": or_none(SIZE), "shape": or_none(_shape(DIM))},
)
STEP = record(Step, {"executor": TEXT, "inputs": OPERANDS, "outputs": OPERANDS, "params": PLAIN, "src": TEXTS})
KERNEL = record(
    lambda **fields: check_names(Kernel(**fields)),
    {
        "arch": TEXT,
        "cubin": or_none(SIZE),
        "function": TEXT,
        "generated": table_of(text(SOURCE_LIMIT)),
        "options": TEXTS,
        "source": TEXT,
        "template": TEXT,
    },
)
RANGE = Form(lambda r, where: [r.min, r.opt, r.max], _read_range)
SLOT = Form(lambda slot, where: [slot.lane, *slot.after], _read_slot)
WEIGHTS = Form(
    to_json, lambda plain, where, escaped: table_of(SIZE).read(_read_plain(plain, where, escaped), where, escaped)
)
SOURCE = record(Source, {"model": SIZE, "options": PLAIN, "weights": WEIGHTS}, optional={"calibration": SIZE})
BY_VALUE = record(ByValue, {"inputs": TEXTS, "source": SOURCE})
PLAN = Form(
    lambda plan, where: PROGRAM.write(plan, where), lambda plain, where, escaped: PROGRAM.read(plain, where, escaped)
)
DYNAMIC = record(
    Dynamic,
    {"arena_bytes": SIZE, "inputs": SPECS, "outputs": SPECS, "plans": list_of(PLAN), "source": or_none(SOURCE)},
)
RANKS = record(Ranks, {"inputs": OPERANDS, "outputs": OPERANDS, "programs": list_of(PLAN)})
OPTIONAL = {
    "kernels": (1, list_of(KERNEL)),
    "profiles": (2, list_of(table_of(RANGE))),
    "dynamic": (2, DYNAMIC),
    "by_value": (3, BY_VALUE),
    "lanes": (4, list_of(SLOT)),
    "retained": (5, SIZES),
    "ranks": (7, RANKS),
}
"""Key of the header that may be absent -> the minor version that added it, and its form."""
PROGRAM: Form = record(
    lambda **fields: Program(**fields, blobs=[]),
    {
        "arena_bytes": SIZE,
        "buffers": list_of(BUFFER),
        "inputs": PORTS,
        "meta": PLAIN,
        "outputs": PORTS,
        "precision": TEXT,
        "requires": TEXTS,
        "steps": list_of(STEP),
        "target": TEXT,
    },
    optional={key: form for key, (_, form) in OPTIONAL.items()},
)
"""A program, without the contents of its blobs."""


# ---------------------------------------------------------------- versions


def minor_of(program: Program) -> int:
    """The oldest minor version of the format that can hold a program."""
    own = max((since for key, (since, _) in OPTIONAL.items() if getattr(program, key)), default=0)
    return max([own, 6 if _has_additions_of_6(program) else 0, *map(minor_of, programs_of(program)[1:])])


def _has_additions_of_6(program: Program) -> bool:
    """Whether a program uses additions of 1.6 in steps and sources: the waits of a launch, library inputs that may be empty,
    shapes of the values of a body, calibration."""
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
    """Whether plain attributes (:mod:`optdnn.runtime.steps.attrs`) contain a body of If, Loop or Scan with its values' shapes."""
    if isinstance(value, Mapping):
        body = value.get("graph")
        if len(value) == 1 and isinstance(body, list) and len(body) > 4:
            return True
        return any(map(_has_typed_body, value.values()))
    return isinstance(value, list) and any(map(_has_typed_body, value))
