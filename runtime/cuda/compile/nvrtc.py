"""Compiles CUDA C++ to cubins with NVRTC, and keeps them in a cache on disk. Needs no GPU.

A cubin is keyed by sha256 over everything that affects its bytes: the source with the text of every header it includes, the
options, the architecture, the NVRTC version and :data:`ABI`. A cache entry contains its own digest. Writing is atomic (temporary
file, then rename in the same folder), so concurrent processes and crashes never leave partial entries.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from optdnn.errors import InternalError, MissingDependency, warn
from optdnn.runtime.file.atomic import replace_file
from optdnn.runtime.workers.process import WorkerFailure, WorkerProcess
from optdnn.runtime.workers.wire import Answer, run
from optdnn.temporary import temporary_folder
from optdnn.types import Array

ABI = 1
"""Changes whenever the host's view of a kernel (parameter struct, launch convention) changes without its source changing."""

KERNELS = Path(__file__).parents[1] / "kernels"
TEMPLATE = re.compile(r"\w+\.cuh?", re.ASCII)
"""Names of the files in :data:`KERNELS` and of generated ones."""
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"\n]+)"', re.MULTILINE)
_MAGIC = b"optdnn-cubin-1\n"


def template_files() -> dict[str, Path]:
    """The files in :data:`KERNELS` by name, without links. Each family has a folder; sources include a file without its folder."""
    return _files(KERNELS)


@cache
def _files(folder: Path) -> dict[str, Path]:
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
    return {path.name: path for path in found if TEMPLATE.fullmatch(path.name)}


@lru_cache(maxsize=256)
def _template(path: Path, changed: int, size: int) -> tuple[str, list[str]]:
    """A template's text and its includes; read once, as long as the file does not change."""
    text = path.read_text(encoding="utf-8")
    return text, _INCLUDE.findall(text)


@lru_cache(maxsize=512)
def _framed(text: str) -> bytes:
    """A text preceded by its length. Recipes share most of their texts."""
    encoded = text.encode()
    return b"%d:%b" % (len(encoded), encoded)


@lru_cache(maxsize=1024)
def _digest(*texts: str) -> str:
    """SHA-256 over texts. A build emits the same kernel for many candidates."""
    return hashlib.sha256(b"".join(map(_framed, texts))).hexdigest()


_included = lru_cache(maxsize=1024)(_INCLUDE.findall)
"""The includes of a generated text."""


class KernelError(InternalError):
    """A kernel template does not compile. The message holds the compiler's log."""


class CacheWarning(UserWarning):
    """The kernel cache cannot be written, or an entry was damaged and has been replaced."""


@dataclass(frozen=True)
class Recipe:
    """The sources and options of a cubin.

    ``name`` is a file in ``kernels/``; ``generated`` maps the names of rendered headers to their text; ``arch`` is an NVRTC
    architecture such as ``sm_90a``.
    """

    name: str
    arch: str
    generated: Mapping[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ("--std=c++17", "--use_fast_math")

    def sources(self) -> dict[str, str]:
        """Every text that goes into the compilation, the main file first."""
        texts: dict[str, str] = {}
        pending, files = [self.name], template_files()
        while pending:
            name = pending.pop(0)
            if name in texts:
                continue
            text = self.generated.get(name)
            if text is not None:
                texts[name] = text
                pending += _included(text)
                continue
            path = files.get(name)
            if path is None:
                raise KernelError(f"{self.name}: includes {name!r}, which is neither a file in {KERNELS} nor generated")
            state = os.stat(path)
            texts[name], includes = _template(path, state.st_mtime_ns, state.st_size)
            pending += includes
        return texts

    def key(self) -> str:
        """The cache key: 64 hexadecimal digits."""
        return self.digest(f"abi {ABI}", f"nvrtc {'.'.join(map(str, version()))}")

    def digest(self, *first: str) -> str:
        """SHA-256 over ``first`` and all that determines a cubin, except the compiler: named texts, options, architecture."""
        texts = (x for item in sorted(self.sources().items()) for x in item)
        return _digest(*first, self.arch, *self.options, *texts)


@dataclass(frozen=True)
class Resources:
    """ptxas's report on a kernel: registers per thread; spilled (stores + loads), stack frame and static shared bytes."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int


def _preload() -> None:
    """Load NVRTC's wheel from anywhere on ``sys.path``: cuda.bindings searches only the interpreter's own site folders, and so
    misses layered environments. Without such a wheel, its search continues as usual."""
    for folder in sys.path:
        for library in sorted(Path(folder or ".").glob("nvidia/cu1[3-9]/lib/libnvrtc.so.*"), reverse=True):
            if "alt" in library.name:
                continue
            for part in (*library.parent.glob("libnvrtc-builtins.so.*"), library):  # NVRTC opens the builtins by name
                ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)
            return


WITHOUT = "build with --no-cubins: the machine that loads the engine compiles them"


@cache
def _nvrtc() -> ModuleType:
    _preload()
    try:
        return importlib.import_module("cuda.bindings.nvrtc")
    except ImportError as error:
        raise MissingDependency("cuda-bindings", "cuda", "to compile kernels", WITHOUT) from error


def _call(function: Any, *arguments: Any) -> Any:
    nvrtc = _nvrtc()
    try:
        status, *values = function(*arguments)
    except RuntimeError as error:  # cuda.bindings raises this when it finds no libnvrtc
        raise MissingDependency("nvidia-cuda-nvrtc", "cuda", "to compile kernels", WITHOUT) from error
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(f"NVRTC: {nvrtc.nvrtcGetErrorString(status)[1].decode()} ({status.name})")
    return values[0] if len(values) == 1 else tuple(values)


@cache
def version() -> tuple[int, int]:
    """NVRTC's version, for example ``(13, 0)``."""
    major, minor = _call(_nvrtc().nvrtcVersion)
    return int(major), int(minor)


def compile_recipe(recipe: Recipe, *, resources: bool = False) -> tuple[bytes, str]:
    """Compile to a cubin, without the cache. Returns the cubin and the log (with ``resources``, including ptxas's report)."""
    nvrtc = _nvrtc()
    texts = recipe.sources()
    main = texts.pop(recipe.name)
    options = [f"--gpu-architecture={recipe.arch}", *recipe.options]
    if resources:
        options.append("--ptxas-options=-v")
    names = sorted(texts)
    program = _call(
        nvrtc.nvrtcCreateProgram, main.encode(), recipe.name.encode(), len(names),
        [texts[name].encode() for name in names], [name.encode() for name in names],
    )  # fmt: skip
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = bytearray(_call(nvrtc.nvrtcGetProgramLogSize, program))
        _call(nvrtc.nvrtcGetProgramLog, program, log)
        text = bytes(log).rstrip(b"\0").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelError(f"{recipe.name} does not compile for {recipe.arch} ({status.name}):\n{text}")
        cubin = bytearray(_call(nvrtc.nvrtcGetCUBINSize, program))
        _call(nvrtc.nvrtcGetCUBIN, program, cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin), text


def resources(recipe: Recipe) -> dict[str, Resources]:
    """Compile and read ptxas's report: kernel name -> :class:`Resources`."""
    return reported(recipe, compile_recipe(recipe, resources=True)[1])


def reported(recipe: Recipe, log: str) -> dict[str, Resources]:
    """ptxas's report in the log of a compilation: kernel name -> :class:`Resources`."""
    reports: dict[str, Resources] = {}
    name = None
    stack = spill = 0
    for line in log.splitlines():
        if match := re.search(r"Function properties for (\S+)|Compiling entry function '(\S+?)'", line):
            name = match[1] or match[2]
        elif match := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            stack, spill = int(match[1]), int(match[2]) + int(match[3])
        elif (match := re.search(r"Used (\d+) registers", line)) and name:
            shared = re.search(r"(\d+) bytes smem", line)
            reports[name] = Resources(int(match[1]), spill, stack, int(shared[1]) if shared else 0)
    if not reports:
        raise KernelError(f"{recipe.name}: the compiler gave no resource report:\n{log}")
    return reports


def default_folder() -> Path:
    """``$OPTDNN_CACHE/kernels``, or ``optdnn/kernels`` in the user's cache folder (``$XDG_CACHE_HOME``, ``~/.cache``,
    ``%LOCALAPPDATA%``)."""
    if chosen := os.environ.get("OPTDNN_CACHE"):
        return Path(chosen) / "kernels"
    if sys.platform == "win32":
        root = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "optdnn" / "kernels"


COMPILES_S = 24 * 3600.0
"""Seconds that a process may take to compile its share."""
EACH = 2
"""The fewest kernels per compiling process: starting a process takes about as long as compiling a kernel."""


@cache
def _spare(folder: Path) -> tempfile.TemporaryDirectory[str]:
    """The folder for this process's cubins if ``folder`` is not writable; it is removed when the process ends."""
    return temporary_folder("optdnn-kernels-")


class KernelCache:
    """Cubins on disk. Safe under concurrent processes; a damaged entry is reported, recompiled and replaced.

    If the folder is not writable, its entries are still read; new ones go to a temporary folder until the process ends.
    """

    def __init__(self, folder: Path | None = None):
        self.folder = folder or default_folder()
        self.spare: Path | None = None

    def path(self, key: str) -> Path:
        """The path of the entry of ``key``."""
        return self.folder / f"{key}.cubin"

    def get(self, recipe: Recipe) -> bytes:
        """The recipe's cubin, compiled if it is not in the cache."""
        key = recipe.key()
        cubin = self._read(key)
        if cubin is None:
            cubin, _ = compile_recipe(recipe)
            self._write(key, cubin)
        return cubin

    def get_many(self, recipes: Sequence[Recipe], workers: int) -> list[bytes]:
        """The cubins of many recipes, in order; missing ones are compiled by up to ``workers`` processes, including this one.

        Processes are used because NVRTC serializes the threads of one process. Raises KernelError with the log of the first
        failure.
        """
        missing = {key: recipe for recipe in recipes if not self._holds(key := recipe.key())}
        others = min(workers, len(missing) // EACH) - 1
        if others > 0:
            self._check_folder()  # the workers write where this process will read
            self._compile(list(missing.items()), others)
        return [self.get(recipe) for recipe in recipes]

    def _holds(self, key: str) -> bool:
        try:
            return any((folder / f"{key}.cubin").is_file() for folder in self._folders())
        except OSError:  # a folder without read permission
            return False

    def _folders(self) -> list[Path]:
        return [self.folder] if self.spare is None else [self.spare, self.folder]

    def _check_folder(self) -> None:
        """Switch to the spare folder if the cache's folder is not writable."""
        if self.spare is None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.folder):
                    pass
            except OSError as error:
                self._use_spare(error)

    def _use_spare(self, error: OSError) -> None:
        warn(
            f"cannot write the kernel cache {self.folder}: {error.strerror or error}; kernels are kept only for this process",
            CacheWarning,
        )
        self.spare = Path(_spare(self.folder).name)

    def _compile(self, jobs: Sequence[tuple[str, Recipe]], others: int) -> None:
        """Compile ``jobs`` into the cache, with ``others`` further processes."""
        folder = self.spare or self.folder
        failed: list[str] = []
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(others))
            asked = []
            for i in range(others):
                # Ctrl-C is for this process, which then ends the others.
                worker = WorkerProcess(1, COMPILES_S, f"{__name__}:main", alone=True)
                stack.callback(worker.kill)
                share = [[r.name, r.arch, dict(r.generated), r.options] for _, r in jobs[1 + i :: 1 + others]]
                message = {"command": "compile", "folder": str(folder), "recipes": share}
                asked.append(pool.submit(worker.ask, message))
            for key, recipe in jobs[:: 1 + others]:
                try:
                    self._write(key, compile_recipe(recipe)[0])
                except KernelError as error:  # the others are still compiled
                    failed.append(error.message)
            for future in asked:
                try:
                    failed += future.result()[0]["failed"]
                except WorkerFailure as failure:
                    failed.append(str(failure))
        if failed:
            raise KernelError(f"a compiling process failed: {failed[0]}")

    def _read(self, key: str) -> bytes | None:
        for folder in self._folders():
            path = folder / f"{key}.cubin"
            try:
                blob = path.read_bytes()
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                warn(f"cannot read the kernel cache {folder}: {error.strerror or error}", CacheWarning)
                continue
            head = len(_MAGIC) + 32
            payload = blob[head:]
            if blob[: len(_MAGIC)] == _MAGIC and blob[len(_MAGIC) : head] == hashlib.sha256(payload).digest():
                return payload
            warn(f"{path} is damaged; it is compiled again", CacheWarning)
        return None

    def _write(self, key: str, cubin: bytes) -> None:
        if self.spare is None:
            try:
                _put(self.folder, key, cubin)
                return
            except OSError as error:
                self._use_spare(error)
        assert self.spare is not None
        with suppress(OSError):  # the user was warned; the kernel is compiled again when needed
            _put(self.spare, key, cubin)


def _put(folder: Path, key: str, cubin: bytes) -> None:
    """Write an entry completely or not at all. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    pieces = [_MAGIC, hashlib.sha256(cubin).digest(), cubin]
    replace_file(str(folder / f"{key}.cubin"), pieces, flush=False)


class _CompilingWorker:
    """A process of :meth:`KernelCache.get_many`. ``compile``: a folder and recipes -> the failed ones, with errors."""

    def do_compile(self, message: Mapping[str, Any], arrays: Mapping[str, Array]) -> Answer:
        cache, failed = KernelCache(Path(message["folder"])), []
        for name, arch, generated, options in message["recipes"]:
            try:
                cache.get(Recipe(name, arch, generated, tuple(options)))
            except KernelError as error:  # the others are still compiled
                failed.append(error.message)
        return {"failed": failed}, None


def main() -> None:
    """Serve until the parent has ended."""
    run(_CompilingWorker())
