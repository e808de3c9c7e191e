"""A kernel launch that has no addresses yet: plain data that needs no GPU, with operands by name.

A family's ``launch(problem, config, …)`` returns a :class:`Launch`. :meth:`optdnn.kernels.builder.Builder.emit` adds it to a program and
replaces the names of its operands by numbers of buffers.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from optdnn.errors import UnsupportedError
from optdnn.runtime.cuda.compile.nvrtc import Recipe
from optdnn.runtime.cuda.launches.plan import CLUSTER, MAP_BYTES, NOTHING, Pointer, TensorMap

GENERAL = ("--std=c++17",)
"""Compiler options of generated kernels. They do not use fast math: these kernels are the accurate ones."""
BLOCK_SHARED = 232448
"""Bytes of shared memory that a block of any Hopper GPU may have."""
SECTOR = 32
"""Bytes of a sector, the least that L2 and memory move."""


def whole_kib(size: int) -> int:
    """``size`` bytes, rounded up to whole KiB: what TMA writes to shared memory begins at multiples of them."""
    return -(-size // 1024) * 1024


def no_room(needed: int, shared: int, blocks: int) -> str | None:
    """Why ``blocks`` blocks with ``needed`` bytes of shared memory each do not fit a multiprocessor, or None. ``shared``: most bytes of a
    block."""
    if needed > shared:
        return f"{needed} bytes of shared memory exceed {shared}"
    if blocks > 1 and blocks * (needed + 1024) > shared + 1024:  # the system reserves a kilobyte per block
        return "shared memory does not allow that many blocks per multiprocessor"
    return None


def at_once(shared: int, blocks: int) -> int:
    """The blocks of a multiprocessor of Hopper that its shared memory has room for, at most ``blocks``. ``shared``: bytes of a block."""
    return max(1, min(blocks, 233472 // (shared + 1024)))


def template_options(*dtypes: str, exact: bool = False, fast: bool = True) -> tuple[str, ...]:
    """Compiler options of a kernel template on these element types. ``exact``: no fused multiply-adds, so products are rounded before
    an addition. ``fast``: functions are inexact in the last bits of fp32."""
    wanted = {
        "--use_fast_math": fast,
        "--fmad=false": exact,
        "-DDTYPE_BF16": "bfloat16" in dtypes,
    }
    return ("--std=c++17", *(option for option, on in wanted.items() if on))


@dataclass(frozen=True)
class Launch:
    """One launch of the kernel ``function`` in the module that ``recipe`` compiles, with ``block`` threads per block.

    ``parameters`` is the kernel's parameter block. ``pointers`` and ``maps`` are its fields for the addresses and tensor maps of named
    operands. ``waits`` declares what blocks wait for in addition to earlier launches
    (:data:`optdnn.runtime.cuda.launches.plan.WAITS`).
    """

    recipe: Recipe
    function: str
    grid: tuple[int, int, int]
    block: int
    parameters: bytes
    pointers: tuple[Pointer[str], ...] = ()
    maps: tuple[TensorMap[str], ...] = ()
    shared: int = 0
    cluster: int = 1
    waits: str = NOTHING

    @property
    def relocations(self) -> tuple[Pointer[str] | TensorMap[str], ...]:
        """The fields of the parameter block that are filled in once addresses are known."""
        return (*self.pointers, *self.maps)

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of all operands, in the order of the parameter block."""
        places = sorted((r.at, r.operand) for r in self.relocations)
        return tuple(dict.fromkeys(name for _, name in places))


def tensor_map(
    operand: str, dtype: str, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int, *,
    offset: int = 0, corners: Sequence[int] = (), steps: Sequence[int] = (),
) -> TensorMap[str]:  # fmt: skip
    """A tensor map without a place in a parameter block; the fields are those of :class:`TensorMap`."""
    return TensorMap(
        0, operand, offset, dtype, tuple(shape), tuple(strides), tuple(box), swizzle, tuple(corners), tuple(steps)
    )


class Parameters:
    """Builds a kernel's parameter block, field by field, with C's layout (natural alignment, little endian)."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._align = 1
        self._pointers: list[Pointer[str]] = []
        self._maps: list[TensorMap[str]] = []

    def _put(self, form: str, size: int, values: Sequence[float]) -> Parameters:
        self._to_multiple(size if values else 1)
        try:
            self._data.extend(struct.pack(f"<{len(values)}{form}", *values))
        except (struct.error, OverflowError) as error:
            raise UnsupportedError(
                f"a kernel's parameter would be {max(map(abs, values))}, which does not fit {size} bytes",
                hint="GPU kernels only take smaller sizes: build for --target cpu",
            ) from error
        return self

    def _to_multiple(self, align: int) -> None:
        self._align = max(self._align, align)
        self._data.extend(bytes(-len(self._data) % align))

    def pointer(self, *operands: str | None, offset: int = 0) -> Parameters:
        """The address of byte ``offset`` of each operand (a null pointer for None)."""
        for operand in operands:
            self._put("Q", 8, [0])
            if operand is not None:
                self._pointers.append(Pointer(len(self._data) - 8, operand, offset))
        return self

    def tensor_map(self, *maps: TensorMap[str]) -> Parameters:
        """Tensor maps: 128 bytes each, aligned to 64."""
        for each in maps:
            self._to_multiple(64)
            self._maps.append(replace(each, at=len(self._data)))
            self._data.extend(bytes(MAP_BYTES))
        return self

    def i32(self, *values: int) -> Parameters:
        """``int`` fields."""
        return self._put("i", 4, values)

    def u32(self, *values: int) -> Parameters:
        """``unsigned`` fields."""
        return self._put("I", 4, values)

    def sizes(self, *values: int) -> Parameters:
        """``Size`` fields (``general.cuh``): divisors of numbers below 2^31."""
        for n in values:
            shift = 31 + max(n - 1, 0).bit_length()
            self.u32(n, -(-(1 << shift) // max(n, 1)), shift)
        return self

    def i64(self, *values: int) -> Parameters:
        """``long long`` fields."""
        return self._put("q", 8, values)

    def integers(self, kind: str, *values: int) -> Parameters:
        """Fields of the type ``i32`` or ``i64``."""
        return self.i32(*values) if kind == "i32" else self.i64(*values)

    def f32(self, *values: float) -> Parameters:
        """``float`` fields."""
        return self._put("f", 4, values)

    def launch(
        self, recipe: Recipe, function: str, grid: int | tuple[int, int, int], block: int, *, shared: int = 0, cluster: int = 1,
        waits: str = "",
    ) -> Launch:  # fmt: skip
        """The launch with this block, padded to the size of the kernel's struct. ``grid``: blocks along x, or along all axes.

        ``waits`` "" means the peers of a cluster, if there is one.
        """
        self._to_multiple(self._align)
        return self._launch(recipe, function, grid, block, shared, cluster, waits)

    def finished(self) -> tuple[bytes, tuple[Pointer[str], ...]]:
        """The block so far, and its address fields."""
        return bytes(self._data), tuple(self._pointers)

    def generated(
        self, arch: str, text: str, function: str, grid: int | tuple[int, int, int], block: int, *, shared: int = 0,
        options: tuple[str, ...] = GENERAL, template: str = "general.cu", waits: str = "",
    ) -> Launch:  # fmt: skip
        """The launch of the kernel ``function`` of the generated C++ ``text``."""
        recipe = Recipe(template, arch, {"generated.cuh": text}, options)
        return self._launch(recipe, function, grid, block, shared, 1, waits)

    def _launch(
        self, recipe: Recipe, function: str, grid: int | tuple[int, int, int], block: int, shared: int, cluster: int, waits: str,
    ) -> Launch:  # fmt: skip
        whole = (grid, 1, 1) if isinstance(grid, int) else grid
        return Launch(
            recipe, function, whole, block, bytes(self._data), tuple(self._pointers), tuple(self._maps), shared, cluster,
            waits or (CLUSTER if cluster > 1 else NOTHING),
        )  # fmt: skip
