"""The lockfile of a build: everything that determined it, so that the same bytes can be built again.

``build --lock FILE`` writes it, ``build --locked FILE`` builds from it: facts that differ are reported before the work, the
measured times come from the file, and an engine with other bytes is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import optdnn
from optdnn.config import BuildOptions
from optdnn.errors import NotMet, UsageError
from optdnn.image_spec import ImageSpec
from optdnn.importers.model import Source, open_model
from optdnn.importers.split_weights import split_weights
from optdnn.ranges import input_shapes
from optdnn.runtime.cuda.device import facts_for
from optdnn.runtime.file.atomic import write_atomic
from optdnn.runtime.file.format import encode
from optdnn.runtime.file.json_file import read_json
from optdnn.runtime.measuring.machine import machine, versions
from optdnn.runtime.program import Plain, Program
from optdnn.target_name import TargetName
from optdnn.tuning.timing_cache import TimingCache

FORMAT, VERSION = "optdnn-lock", 1
MACHINE = ("cpu", "architecture", "usable_cores", "flags")
"""Facts of the machine that affect a build; on a GPU also the GPU's facts, and the driver."""
SEEDS = {"inputs of checks and measurements": 1, "split of calibration data": 0}
"""The seeds of all random numbers in a build."""
FILES = frozenset({"timing_cache", "calib_cache", "dump", "emit_onnx", "debug", "lock", "locked", "calib", "labels"})
"""Options that the lockfile records by their contents, or that do not affect the engine."""
SHOWN = 12
"""The most differences that an error names."""


@dataclass(frozen=True)
class Lockfile:
    """The facts that determined a build, its measured times (``timings``: sections of a timing cache), and the digests of its
    engine and of the engine's parts."""

    facts: Mapping[str, Plain]
    timings: Mapping[str, Plain]
    engine: Mapping[str, Plain]

    @classmethod
    def read(cls, path: Path) -> Lockfile:
        """Raises UsageError for a file that is not a lockfile of this version."""
        try:
            data: Any = read_json(path)
        except FileNotFoundError:
            raise UsageError(f"there is no lockfile {path}", hint="write it with --lock") from None
        except (OSError, ValueError) as error:
            raise UsageError(f"{path} is not a lockfile: {error}", hint="write it with --lock") from None
        tables = [data.get(k) if isinstance(data, dict) else None for k in ("facts", "timings", "engine")]
        known = isinstance(data, dict) and (data.get("format"), data.get("version")) == (FORMAT, VERSION)
        if not known or not all(isinstance(t, dict) for t in tables):
            raise UsageError(f"{path} is not a lockfile of version {VERSION}", hint="write it again with --lock")
        return cls(*tables)  # type: ignore[arg-type]

    def write(self, path: Path) -> None:
        """Write the file atomically. Raises OutputError."""
        data = {
            "format": FORMAT,
            "version": VERSION,
            "facts": self.facts,
            "engine": self.engine,
            "timings": self.timings,
        }
        write_atomic(path, [(json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()])

    def check_facts(self, now: Mapping[str, Plain]) -> None:
        """Raise NotMet that names every fact that differs from the present ones."""
        _refuse("this build would not be the locked one", _different(self.facts, now, ""))

    def check_engine(self, program: Program) -> None:
        """Raise NotMet that names the differing parts of the engine, unless its file has exactly the same bytes."""
        now = engine_digests(program)
        if now["sha256"] != self.engine.get("sha256"):
            parts = _different(self.engine.get("parts"), now["parts"], "")
            names = [line.partition(":")[0] for line in parts] or ["bytes outside of these parts"]
            _refuse("the engine has other bytes than the locked one; nothing was written. These parts differ", names)


def _refuse(what: str, lines: list[str]) -> None:
    if lines:
        more = [] if len(lines) <= SHOWN else [f"and {len(lines) - SHOWN} more"]
        raise NotMet(
            "\n  ".join([f"{what}:", *lines[:SHOWN], *more]),
            hint="write the lockfile again with --lock, or restore these",
        )


def _different(old: Any, new: Any, where: str) -> list[str]:
    """A line for each entry of nested tables that differs."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        lines = (
            _different(old.get(k), new.get(k), f"{where}.{k}" if where else str(k)) for k in sorted({**old, **new})
        )
        return [line for found in lines for line in found]
    return [] if old == new else [f"{where}: locked {_short(old)}, now {_short(new)}"]


def _short(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---------------------------------------------------------------- facts


def facts_of(model: Source, options: BuildOptions) -> dict[str, Plain]:
    """Everything except measured times that determines a build with these options (their target must be resolved).

    Raises UsageError for calibration data that cannot be read twice."""
    here = machine()
    found: dict[str, Plain] = {
        "model": _model_digest(model),
        "options": _options(options),
        "versions": {**versions(), "code": code_digest()},
        "machine": {name: here[name] for name in MACHINE},
        "seeds": dict(SEEDS),
    }
    if options.calib is not None:
        found["calibration"] = {
            "data": data_digest(options.calib),
            "labels": None if options.labels is None else data_digest(options.labels),
        }
    name = TargetName.parse(options.target)
    if name.on_gpu:
        gpu = json.loads(json.dumps(asdict(facts_for(name))))
        found["gpu"] = {**gpu, "driver": here.get("gpu_driver")}
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


def _model_digest(source: Source) -> str:
    """SHA-256 of the model with its external weights, independent of how these are stored."""
    data, weights = split_weights(open_model(source))
    digest = hashlib.sha256(data)
    for name, array in sorted(weights.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _options(options: BuildOptions) -> dict[str, Plain]:
    """The options as plain data."""
    table = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in FILES}
    table["shapes"] = input_shapes(options.shapes).to_plain()
    table["images"] = None if options.images is None else ImageSpec.read(options.images).to_plain()
    table["custom_ops"] = {op.name: op.digest for op in options.custom_ops}
    table["values"] = {name: np.asarray(value).tolist() for name, value in options.values.items()}
    for pictures in ("preprocess", "postprocess"):
        table[pictures] = {name: spec.to_plain() for name, spec in table[pictures].items()}
    metric = options.metric
    table["metric"] = metric if isinstance(metric, str) else f"{metric.__module__}:{metric.__qualname__}"
    return table


def data_digest(data: Any) -> str:
    """SHA-256 of calibration data or labels: a file, a folder, arrays or a list of feeds.

    Raises UsageError for data that can be read only once, or that a function makes."""
    digest = hashlib.sha256()
    if isinstance(data, (str, Path)):
        path = Path(data)
        files = sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]
        for file in files:
            digest.update(f"{file.relative_to(path)} {_file_digest(file)}\n".encode())
        return digest.hexdigest()
    for part in _arrays(data):
        digest.update(part)
    return digest.hexdigest()


def _arrays(data: Any) -> Iterable[bytes]:
    if isinstance(data, Mapping):
        for name, value in sorted(data.items()):
            yield f"{name} ".encode()
            yield from _arrays(value)
    elif isinstance(data, (list, tuple)) and data and isinstance(data[0], (Mapping, np.ndarray)):
        for feed in data:
            yield from _arrays(feed)
    elif isinstance(data, (np.ndarray, list, tuple)):
        array = np.ascontiguousarray(data)
        yield f"{array.dtype} {array.shape} ".encode()
        yield array.tobytes()
    else:
        raise UsageError(
            f"a lockfile cannot record calibration data of type {type(data).__name__}",
            hint="give a file, a folder or arrays",
        )


def _file_digest(path: Path) -> str:
    try:
        with path.open("rb") as f:
            return hashlib.file_digest(f, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


@cache
def code_digest() -> str:
    """SHA-256 of optdnn's own sources: the version number does not change during development."""
    found: dict[str, str] = {}
    for root in map(Path, optdnn.__path__):  # in a clone, passes and runtime are next to optdnn's folder
        for base in (root / "passes", root / "runtime", *([root] if (root / "compiler.py").exists() else [])):
            for path in base.rglob("*"):
                name = path.relative_to(root)
                if path.suffix in (".py", ".cu", ".cuh") and name.parts[0] not in ("cli", "models"):
                    found[name.as_posix()] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()


# ---------------------------------------------------------------- the engine


def engine_digests(program: Program) -> dict[str, Plain]:
    """The digest of the engine's file, and of its parts: entries of the header and of ``meta``, blobs by number."""
    pieces = encode(program)
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    header = json.loads(bytes(pieces[2]))
    blobs = {f"blob {k}": b["sha256"][:16] for k, b in enumerate(header.pop("blobs"))}
    meta = {f"meta.{name}": _digest(value) for name, value in header.pop("meta").items()}
    parts = {name: _digest(value) for name, value in header.items()}
    return {"sha256": digest.hexdigest(), "parts": {**parts, **meta, **blobs}}


def _digest(value: Plain) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


# ---------------------------------------------------------------- a build


def locked_cache(model: Source, options: BuildOptions, resolve: Callable[[str], str]) -> TimingCache:
    """The timing cache of a build: the lockfile's, after its facts are checked; without a lockfile, the options'."""
    if options.locked is None:
        return TimingCache.open(options.timing_cache)
    lock = Lockfile.read(options.locked)
    lock.check_facts(facts_of(model, _resolved(options, resolve)))
    return TimingCache.of_sections(lock.timings, str(options.locked))


def finish_lock(
    model: Source, options: BuildOptions, resolve: Callable[[str], str], program: Program, used: TimingCache
) -> None:
    """Check the engine against its lockfile, and write the requested lockfile."""
    if options.locked is not None:
        Lockfile.read(options.locked).check_engine(program)
    if options.lock is not None:
        facts = facts_of(model, _resolved(options, resolve))
        Lockfile(facts, used.excerpt(), engine_digests(program)).write(options.lock)


def _resolved(options: BuildOptions, resolve: Callable[[str], str]) -> BuildOptions:
    return replace(options, target=resolve(options.target))
