"""What a kernel launch is before it has addresses: plain data that needs no GPU, and its binding to a :class:`Launch`.

A family's ``describe(problem, config)`` gives a :class:`Description`: grid, block, shared memory, cluster, the bytes of the
kernel's one parameter block, and where in it addresses and tensor maps of the named operands go.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from optdnn.errors import InternalError
from optdnn.runtime.cuda.compile.nvrtc import KernelCache, Recipe
from optdnn.runtime.cuda.device import TENSOR_MAP_BYTES, Function, Launch, encode_tiled


@dataclass(frozen=True)
class PointerAt:
    """The address of byte ``offset`` of operand ``operand`` belongs at byte ``at`` of the parameter block."""

    at: int
    operand: str
    offset: int = 0


@dataclass(frozen=True)
class MapAt:
    """A tiled tensor map of operand ``operand`` belongs at byte ``at``; fields as of
    :func:`optdnn.runtime.cuda.device.encode_tiled`."""

    at: int
    operand: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    offset: int = 0


@dataclass(frozen=True)
class Description:
    """One launch without addresses. ``entry`` is the kernel's name in the cubin of its recipe."""

    entry: str
    grid: tuple[int, int, int]
    block: int
    parameters: bytes
    pointers: tuple[PointerAt, ...] = ()
    maps: tuple[MapAt, ...] = ()
    shared: int = 0
    cluster: int = 1

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of all operands, in the order of the parameter block."""
        places = sorted([(p.at, p.operand) for p in self.pointers] + [(m.at, m.operand) for m in self.maps])
        return tuple(dict.fromkeys(name for _, name in places))


class ParameterBlock:
    """Builds a parameter block with C's layout (natural alignment, little endian)."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._align = 1
        self._pointers: list[PointerAt] = []
        self._maps: list[MapAt] = []

    def _put(self, form: str, value: float | int) -> None:
        size = struct.calcsize(form)
        self._align = max(self._align, size)
        self._data.extend(bytes(-len(self._data) % size))
        self._data.extend(struct.pack("<" + form, value))

    def pointer(self, operand: str | None, offset: int = 0) -> ParameterBlock:
        """The address of an operand (a null pointer for None)."""
        self._put("Q", 0)
        if operand is not None:
            self._pointers.append(PointerAt(len(self._data) - 8, operand, offset))
        return self

    def tensor_map(
        self, operand: str, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int,
        offset: int = 0,
    ) -> ParameterBlock:  # fmt: skip
        """A tensor map: 128 bytes, aligned to 64."""
        self._align = max(self._align, 64)
        self._data.extend(bytes(-len(self._data) % 64))
        self._maps.append(MapAt(len(self._data), operand, dtype, shape, strides, box, swizzle, offset))
        self._data.extend(bytes(TENSOR_MAP_BYTES))
        return self

    def i32(self, *values: int) -> ParameterBlock:
        """``int`` fields."""
        for value in values:
            self._put("i", value)
        return self

    def i64(self, *values: int) -> ParameterBlock:
        """``long long`` fields."""
        for value in values:
            self._put("q", value)
        return self

    def f32(self, *values: float) -> ParameterBlock:
        """``float`` fields."""
        for value in values:
            self._put("f", value)
        return self

    def describe(
        self, entry: str, grid: tuple[int, int, int], block: int, *, shared: int = 0, cluster: int = 1
    ) -> Description:
        """The finished description."""
        data = bytes(self._data) + bytes(-len(self._data) % self._align)
        return Description(entry, grid, block, data, tuple(self._pointers), tuple(self._maps), shared, cluster)


def load(recipe: Recipe, description: Description, cache: KernelCache) -> Function:
    """The description's kernel on the current device."""
    return Function(
        cache.get(recipe), description.entry, shared=description.shared, wide_cluster=description.cluster > 8
    )


def bind(
    description: Description,
    function: Function,
    addresses: Mapping[str, int],
    *,
    dependent: bool = True,
    label: str = "",
) -> Launch:
    """The launch on these device addresses, by operand name. Raises InternalError for a missing one."""
    missing = [name for name in description.operands if not addresses.get(name)]
    if missing:
        raise InternalError(f"{description.entry}: no address for {', '.join(missing)}")
    block = bytearray(description.parameters)
    for p in description.pointers:
        block[p.at : p.at + 8] = struct.pack("<Q", addresses[p.operand] + p.offset)
    for m in description.maps:
        encoded = encode_tiled(m.dtype, addresses[m.operand] + m.offset, m.shape, m.strides, m.box, m.swizzle)
        block[m.at : m.at + TENSOR_MAP_BYTES] = encoded
    return Launch(
        function, description.grid, description.block, [bytes(block)], shared=description.shared,
        cluster=description.cluster, dependent=dependent, label=label,
    )  # fmt: skip
