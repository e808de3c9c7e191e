"""The memory of one context: its arena, memory for inputs and outputs, and pinned host memory, which stages
NumPy arrays and holds the operands of operators on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from optdnn.runtime.contexts.base import hand_over
from optdnn.runtime.cuda.allocator import DeviceMemory, PinnedMemory, download, fill
from optdnn.runtime.cuda.launches.chain import Transfer
from optdnn.runtime.cuda.launches.steps import ParsedStep
from optdnn.runtime.cuda.memory.shared import Arena
from optdnn.runtime.program import Program
from optdnn.runtime.steps.host import TO_HOST, CopyPlan, HostPlan, run_host
from optdnn.types import Array


class ContextMemory:
    """The memory of one context on the GPU and on the host, by number of buffer.

    ``steps`` are the program's, parsed; ``on_host`` the buffers on the host; ``constants`` the addresses of the weights;
    ``arena``: an arena that contexts share (None: its own).
    """

    def __init__(
        self,
        program: Program,
        steps: Sequence[ParsedStep],
        on_host: frozenset[int],
        constants: Mapping[int, int],
        arena: Arena | None = None,
    ):
        self._program, self._on_host, self._constants = program, on_host, constants
        size = program.arena_bytes
        self.arena = DeviceMemory(size, "the arena of activations") if arena is None else arena.at_least(size)
        own = DeviceMemory if arena is None else arena.own
        self._own: dict[int, DeviceMemory] = {}
        outside = {i for _, i in (*program.inputs, *program.outputs)}
        for i, b in enumerate(program.buffers):
            if b.blob is None and i not in on_host and (i in outside or b.offset is None):
                self._own[i] = own(b.nbytes or 0, f"buffer {b.name!r}")
        for i in program.retained:
            self._own[i].clear()
        moved = {s.host for s in steps if isinstance(s, CopyPlan)}
        self.host = {
            i: PinnedMemory(program.buffers[i].nbytes or 0)
            for i in sorted(outside | moved)
            if program.buffers[i].blob is None
        }
        """Staging memory of inputs and outputs, and of tensors that are copied between the GPU and operators on the host."""
        self._values = self._host_values()

    def address(self, buffer: int, given: Mapping[int, int]) -> int:
        """The address of a buffer on the GPU; ``given``: addresses of inputs and outputs that belong to the caller."""
        b = self._program.buffers[buffer]
        if buffer in given:
            return given[buffer]
        if b.blob is not None:
            return self._constants[buffer]
        return self._own[buffer].pointer if buffer in self._own else self.arena.pointer + (b.offset or 0)

    def fill(self, buffer: int, byte: int) -> None:
        """Set the bytes of a buffer on the GPU, for checks."""
        if size := self._program.buffers[buffer].nbytes:
            fill(self.address(buffer, {}), byte, size)

    def download(self, buffer: int) -> Array:
        """The elements of a buffer on the GPU, as a one-dimensional array."""
        b = self._program.buffers[buffer]
        return download(self.address(buffer, {}), np.empty((b.nbytes or 0) // b.dtype.itemsize, b.dtype))

    def copy_in(self, stream: int) -> None:
        """Enqueue the copies of the staged inputs to the GPU."""
        for spec, i in self._program.inputs:
            if i not in self._on_host and (size := self.host[i].bytes.nbytes):
                Transfer(self._own[i].pointer, self.host[i].pointer, size, False, spec.name).enqueue(stream)

    def copy_out(self, stream: int) -> None:
        """Enqueue the copies of the results to their staging memory."""
        for spec, i in self._program.outputs:
            if i not in self._on_host and (size := self._program.buffers[i].nbytes):
                Transfer(self.host[i].pointer, self.address(i, {}), size, True, spec.name).enqueue(stream)

    def _host_values(self) -> list[Array | None]:
        """The arrays on the host, by buffer: constants, and pinned memory that copies fill; the last entry stays None."""
        p = self._program
        values: list[Array | None] = [None if b.blob is None else p.blobs[b.blob] for b in p.buffers]
        for i in self.host:
            if i in self._on_host and p.buffers[i].nbytes is not None:
                values[i] = self.pinned(i)
        values.append(None)
        return values

    def pinned(self, buffer: int) -> Array:
        """The staging memory of a buffer, as an array of its shape."""
        b = self._program.buffers[buffer]
        return self.host[buffer].bytes.view(b.dtype).reshape(b.sizes)

    def value(self, buffer: int) -> Array | None:
        """The array of a buffer on the host; None before it is computed."""
        return self._values[buffer]

    def use(self, buffer: int, value: Array) -> None:
        """Use this array as a buffer on the host."""
        self._values[buffer] = value

    def run_on_host(self, plan: HostPlan) -> None:
        run_host(plan, self._values)
        for i in plan.outputs:
            value = self._values[i]
            if i in self.host and value is not None and self._program.buffers[i].nbytes is not None:
                np.copyto(self.pinned(i), value)

    def transfer(self, plan: CopyPlan, given: Mapping[int, int]) -> Transfer:
        """The copy of a copy step (``given`` as for :meth:`address`)."""
        device = self.address(plan.device, given) + plan.offset * plan.dtype.itemsize
        here = self.host[plan.host].pointer
        back = plan.to == TO_HOST
        return Transfer(*((here, device) if back else (device, here)), plan.nbytes, back, plan.label)

    def sized_by_data(self) -> dict[str, Array]:
        """The last run's results whose size depends on data: NumPy arrays, wherever the inputs were."""
        p = self._program
        return {s.name: hand_over(s, self._values[i], None) for s, i in p.outputs if p.buffers[i].nbytes is None}
