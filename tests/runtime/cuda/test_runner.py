"""The messages of the cuda runner on machines that cannot run the engine; kernels from engines; stale recipes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from support.net import Net
from support.simulated import feeds_of, lowered

import optdnn
from optdnn.errors import EngineError, EngineStale, InputError, MissingDependency, OptdnnError, RunError, UsageError
from optdnn.ir.graph import Graph
from optdnn.runtime.cuda.compile import nvrtc
from optdnn.runtime.cuda.compile import recipes as kernels_of
from optdnn.runtime.cuda.device import Device, gpu_count
from optdnn.runtime.cuda.gpu_facts import of_arch
from optdnn.runtime.cuda.memory import arrays
from optdnn.runtime.cuda.memory.arrays import on_gpu, pointer_of, stream_handle
from optdnn.runtime.cuda.memory.loaded import check_arch, check_driver
from optdnn.runtime.engine import Engine
from optdnn.runtime.file import format as engine_format
from optdnn.runtime.program import Program
from optdnn.runtime.steps.executor import LoadOptions
from optdnn.targets import resolve_target
from optdnn.types import FP16, FP32, TensorSpec


def _no_gpu() -> bool:
    try:
        return gpu_count() == 0
    except OptdnnError:
        return True


without_gpu = pytest.mark.skipif(not _no_gpu(), reason="there is a GPU")


def net() -> Graph:
    n = Net()
    return n.done(n.op("Tanh", n.op("Add", n.input(4, 8), 0.25)))


def program(**options: Any) -> Program:
    return lowered(net(), "fp32", target="cuda:sm_90a", **options)


@without_gpu
def test_an_engine_can_be_made_and_saved_but_not_run_without_a_gpu(tmp_path: Path) -> None:
    engine = Engine(program(), options=LoadOptions(defer=True))
    engine.save(tmp_path / "e.engine")
    with pytest.raises((RunError, MissingDependency)):
        engine.run(feeds_of(net()))
    with pytest.raises((RunError, MissingDependency)):
        optdnn.load(tmp_path / "e.engine")
    simulated = optdnn.load(tmp_path / "e.engine", simulate=True)
    got = simulated.run(feeds_of(net()))["y0"]
    np.testing.assert_allclose(got, np.tanh(feeds_of(net())["x"] + 0.25), rtol=1e-6)


@without_gpu
def test_cuda_alone_needs_a_gpu() -> None:
    with pytest.raises((UsageError, MissingDependency)) as caught:
        resolve_target("cuda")
    assert "cuda" in str(caught.value)


def test_simulate_is_for_programs_of_gpus() -> None:
    from programs import mlp

    with pytest.raises(EngineError, match="for target 'reference'"):
        Engine(mlp(), options=LoadOptions(simulate=True))


def device(*capability: int) -> Device:
    return Device(
        **vars(replace(of_arch("sm_90a"), name="GPU", capability=(capability[0], capability[1]))),
        index=0,
        driver_version=(13, 0),
    )


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [("sm_90a", (9, 0), True), ("sm_90a", (10, 0), False), ("sm_90a", (8, 0), False), ("sm_80", (8, 0), True),
     ("sm_80", (8, 6), True), ("sm_80", (9, 0), False), ("sm_86", (8, 0), False), ("sm_120", (12, 0), True)],
)  # fmt: skip
def test_architectures(arch: str, capability: tuple[int, int], runs: bool) -> None:
    if runs:
        check_arch(arch, device(*capability))
    else:
        with pytest.raises(EngineError, match=f"was built for {arch}; this GPU, GPU, is sm_.*\n.*--target cuda:sm_"):
            check_arch(arch, device(*capability))


@pytest.mark.parametrize(("compiler", "runs"), [("12.9", True), ("13.0", True), ("13.2", True), ("14.0", False)])
def test_drivers(compiler: str, runs: bool) -> None:
    if runs:
        check_driver(compiler, device(9, 0))
    else:
        with pytest.raises(
            EngineError, match=r"kernels are for CUDA 14.0; the driver here supports CUDA 13.0\n.*update"
        ):
            check_driver(compiler, device(9, 0))


# ---------------------------------------------------------------- kernels


@pytest.mark.nvrtc
def test_cubins_travel_in_the_engine_and_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTDNN_CACHE", str(tmp_path / "cache"))
    made = program(no_cubins=False)
    assert all(k.cubin is not None for k in made.kernels)
    kept = kernels_of.cubins(made, trust=True)
    assert all(c.startswith(b"\x7fELF") for c in kept)
    monkeypatch.setenv("OPTDNN_CACHE", str(tmp_path / "another"))
    assert kernels_of.cubins(made) == kept, "compiled from the recipe, the same bytes"
    assert list((tmp_path / "another").rglob("*.cubin"))


@pytest.mark.nvrtc
def test_loading_an_engine_built_here_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTDNN_CACHE", str(tmp_path / "cache"))
    engine_format.write(program(no_cubins=False), tmp_path / "e.engine")
    read = engine_format.read(tmp_path / "e.engine")

    def compiles(*arguments: Any, **more: Any) -> Any:
        raise AssertionError("a kernel is compiled")

    monkeypatch.setattr(nvrtc, "compile_recipe", compiles)
    assert kernels_of.cubins(read) == kernels_of.cubins(read, trust=True)


@pytest.mark.nvrtc
def test_without_cubins_the_recipe_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTDNN_CACHE", str(tmp_path))
    made = program()
    assert all(k.cubin is None for k in made.kernels)
    assert len(kernels_of.cubins(made)) == len(made.kernels)


def test_a_template_that_changed_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    made = program()
    stale = replace(made, kernels=(replace(made.kernels[0], source="0" * 64),))
    with pytest.raises(EngineStale, match=r"another version of general.cu\n.*recompile"):
        kernels_of.cubins(stale)
    gone = replace(made, kernels=(replace(made.kernels[0], template="gone.cu"),))
    with pytest.raises(EngineStale, match=r"another version of gone.cu\n.*rebuild"):
        kernels_of.cubins(gone)


@pytest.mark.nvrtc
def test_recompile_takes_this_versions_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPTDNN_CACHE", str(tmp_path))
    made = program()
    stale = replace(made, kernels=(replace(made.kernels[0], source="0" * 64),))
    assert kernels_of.cubins(stale, recompile=True)


# ---------------------------------------------------------------- arrays of other libraries


class OnGpu:
    """The interface of arrays of CuPy, PyTorch, Numba and PyCUDA."""

    def __init__(self, shape: tuple[int, ...], typestr: str = "<f4", **more: Any):
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (4096, False),
            "version": 3,
            **more,
        }


SPEC = TensorSpec("x", FP32, (2, 3))


def test_pointers_of_arrays() -> None:
    assert on_gpu(OnGpu((2, 3)))
    assert not on_gpu(np.zeros(3))
    assert pointer_of(OnGpu((2, 3)), SPEC, "input 'x'") == 4096
    assert pointer_of(OnGpu((2, 3), strides=(12, 4)), SPEC, "input 'x'") == 4096
    assert pointer_of(OnGpu((2, 3), "<f2"), TensorSpec("x", FP16, (2, 3)), "input 'x'") == 4096


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3), np.float32), "is in host memory"),
        (OnGpu((3, 2)), r"is fp32\[3, 2\], not x: fp32\[2, 3\]"),
        (OnGpu((2, 3), "<f2"), r"is fp16\[2, 3\]"),
        (OnGpu((2, 3), strides=(4, 8)), "not C-contiguous"),
    ],
)
def test_arrays_that_do_not_fit(array: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        pointer_of(array, SPEC, "input 'x'")


def test_buffers_that_are_read_only() -> None:
    with pytest.raises(InputError, match="is read-only"):
        pointer_of(OnGpu((2, 3), data=(4096, True)), SPEC, "the buffer", writable=True)


def test_streams() -> None:
    class CupyStream:
        ptr = 7

    class TorchStream:
        cuda_stream = 9

    assert [stream_handle(s) for s in (3, CupyStream(), TorchStream())] == [3, 7, 9]
    with pytest.raises(InputError, match="str is not a CUDA stream"):
        stream_handle("0")


# ---------------------------------------------------------------- what the driver says of pointers and streams


class FakeDriver:
    """A driver that knows one device pointer per GPU, one pinned pointer, and one stream."""

    class CUresult:
        CUDA_SUCCESS = 0

    class CUpointer_attribute:
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2
        CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9

    class CUmemorytype:
        CU_MEMORYTYPE_HOST = 1

    POINTERS: ClassVar = {0x100: (2, 0), 0x200: (2, 1), 0x300: (1, 0)}
    """Address -> type of the memory, and the GPU."""

    @classmethod
    def cuPointerGetAttribute(cls, attribute: int, pointer: int) -> tuple[int, int]:
        """Like cuda.bindings: the GPU's number is always 0."""
        if pointer not in cls.POINTERS:
            return 1, 0
        return 0, cls.POINTERS[pointer][0] if attribute == 2 else 0

    @staticmethod
    def cuStreamGetCtx(handle: int) -> tuple[int, int]:
        return (0, 77) if handle == 0x500 else (0, 78)


class FakeLibrary:
    """The driver's own library."""

    @staticmethod
    def cuPointerGetAttribute(result: Any, attribute: int, pointer: Any) -> int:
        if attribute != 9 or pointer.value not in FakeDriver.POINTERS:
            return 1
        result._obj.value = FakeDriver.POINTERS[pointer.value][1]
        return 0


@pytest.mark.parametrize(
    ("pointer", "because"),
    [(0x200, "is on GPU 1; the engine runs on GPU 0 (.|\n)*CUDA_VISIBLE_DEVICES"), (0x300, "is not device memory"),
     (0x400, "is not device memory")],
)  # fmt: skip
def test_pointers_of_other_memory(pointer: int, because: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "driver", lambda: FakeDriver)
    monkeypatch.setattr(arrays, "_library", FakeLibrary)
    arrays.check_pointer(0x100, device(9, 0), "x")
    with pytest.raises(InputError, match=because):
        arrays.check_pointer(pointer, device(9, 0), "x")


def test_streams_of_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrays, "driver", lambda: FakeDriver)
    for handle in (*arrays.DEFAULT_STREAMS, 0x500):
        arrays.check_stream(handle, 77)
    with pytest.raises(InputError, match="not one of the GPU that the engine runs on"):
        arrays.check_stream(0x600, 77)
