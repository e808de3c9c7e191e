"""Arrays of other libraries in host memory: they are read in place, with any strides, and results go into them."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from programs import mlp, mlp_expected

from optdnn.errors import InputError
from optdnn.runtime.contexts.dlpack import from_dlpack
from optdnn.runtime.engine import Engine


class Foreign:
    """An array of some library that supports only DLPack."""

    def __init__(self, array: Any, device: int = 1):
        self._array, self._device = array, device

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self._array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.float32).reshape(2, 3, 4),
        np.arange(24, dtype=np.int64).reshape(4, 6).T,
        np.arange(24, dtype=np.uint8)[::3],
        np.array(2.5, np.float16),
        np.ones((2, 2), np.complex64),
        np.array([True, False]),
    ],
    ids=lambda a: f"{a.dtype}{list(a.shape)}",
)
def test_memory_is_read_in_place(array: Any) -> None:
    got = from_dlpack(Foreign(array))
    assert (got.dtype, got.shape, got.strides) == (array.dtype, array.shape, array.strides)
    assert got.ctypes.data == array.ctypes.data
    assert not got.flags.writeable
    np.testing.assert_array_equal(got, array)


def test_no_elements() -> None:
    assert from_dlpack(Foreign(np.empty((0, 3), np.float32))).shape == (0, 3)


def test_the_memory_outlives_its_owner() -> None:
    got = from_dlpack(Foreign(np.arange(100_000)))
    gc.collect()
    np.full(100_000, -1)
    assert got.sum() == 100_000 * 99_999 // 2


def test_an_engine_takes_and_returns_such_arrays() -> None:
    p = mlp()
    x = np.random.default_rng(3).standard_normal((4, 5)).astype(np.float32)
    results = Engine(p).run({"x": Foreign(x)})
    np.testing.assert_allclose(results["y"], mlp_expected(p, x)["y"], rtol=1e-5, atol=1e-6)
    taken = np.from_dlpack(results["y"])
    assert taken.ctypes.data == results["y"].ctypes.data
    with pytest.raises(InputError, match="is fp64; the engine takes fp32"):
        Engine(p).run({"x": Foreign(x.astype(np.float64))})
    with pytest.raises(InputError, match=r"cannot be read as an array: it is on a device \(DLPack's type 2\)"):
        Engine(p).run({"x": Foreign(x, device=2)})


def test_types_of_torch() -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3)
    got = from_dlpack(x)
    assert got.dtype.name == "bfloat16"
    assert got.astype(np.float32).tolist() == [[0, 1, 2], [3, 4, 5]]
