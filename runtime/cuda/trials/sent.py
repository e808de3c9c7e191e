"""Programs sent to the GPU worker and back: both ends of a private pipe, of one version of optdnn on one machine.

A program is sent as an engine file's header, with its arrays separately. The worker keeps each array until the parent gives it
up, so arrays that many programs share (weights, kernels) are sent once. Kernels are sent compiled: the parent compiles them from
the recipes of its own build, and the worker loads them unchanged.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from optdnn.runtime.cuda.compile.nvrtc import KernelCache
from optdnn.runtime.cuda.compile.recipes import cubins
from optdnn.runtime.file.header import header_text, minor_of, parse_header
from optdnn.runtime.program import Kernel, Program
from optdnn.types import Array

PROGRAM = "program"
"""The name of the header among a message's arrays."""
NOT_SENT = -1


class Sender:
    """The parent's end, for the life of one worker. ``cubins`` also holds the code compiled for earlier workers."""

    def __init__(self, cache: KernelCache, cubins: dict[tuple[Any, ...], Array]):
        self._cache, self._cubins = cache, cubins
        self._numbers: dict[int, int] = {}
        self._held: dict[int, weakref.ref[Array]] = {}
        self._count = 0
        self._dropped: list[int] = []

    def pack(self, program: Program) -> tuple[dict[str, Any], dict[str, Array]]:
        """The parts of a message, and its arrays, from which :meth:`Receiver.unpack` restores the program.

        Raises KernelError if a kernel does not compile, EngineStale for a kernel of other templates than this version's.
        """
        blobs, kernels = self._compiled(program)
        used = {b.blob for b in program.buffers if b.blob is not None} | {k.cubin for k in kernels}
        meta = {"nvrtc": program.meta["nvrtc"]} if "nvrtc" in program.meta else {}
        bare = replace(
            program, kernels=kernels, blobs=[], meta=meta, requires=(), profiles=(), dynamic=None, by_value=None
        )
        arrays = {PROGRAM: np.frombuffer(header_text(bare, []).encode(), np.uint8)}
        numbers = []
        for i, blob in enumerate(blobs):
            if i not in used:
                numbers.append(NOT_SENT)
                continue
            number, new = self._number(blob)
            numbers.append(number)
            if new:
                arrays[f"{number}"] = blob
        dropped, self._dropped = self._dropped, []
        return {"minor": minor_of(bare), "blobs": numbers, "dropped": dropped}, arrays

    def _compiled(self, program: Program) -> tuple[list[Array], tuple[Kernel, ...]]:
        """The program's blobs, plus the blobs of kernels that it holds only as recipes; and the kernels, each with its code."""
        missing = {_name(k): k for k in program.kernels if k.cubin is None and _name(k) not in self._cubins}
        compiled = cubins(replace(program, kernels=tuple(missing.values())), trust=True, cache=self._cache)
        self._cubins.update({name: np.frombuffer(c, np.uint8) for name, c in zip(missing, compiled, strict=True)})
        blobs, kernels = list(program.blobs), []
        for k in program.kernels:
            cubin = k.cubin
            if cubin is None:
                cubin = len(blobs)
                blobs.append(self._cubins[_name(k)])
            kernels.append(replace(k, generated={}, options=(), cubin=cubin))
        return blobs, tuple(kernels)

    def _number(self, array: Array) -> tuple[int, bool]:
        """The array's number in the worker, and whether it is new there."""
        known = self._numbers.get(id(array))
        if known is not None:
            return known, False
        self._count += 1
        number = self._numbers[id(array)] = self._count
        self._held[number] = weakref.ref(array, partial(self._drop, id(array), number))
        return number, True

    def _drop(self, name: int, number: int, gone: object) -> None:
        del self._numbers[name], self._held[number]
        self._dropped.append(number)


def _name(k: Kernel) -> tuple[Any, ...]:
    """The key of a kernel's code."""
    return (k.template, k.arch, k.source, k.options)


class Receiver:
    """The worker's end."""

    def __init__(self) -> None:
        self._arrays: dict[int, Array] = {}

    def unpack(self, message: Mapping[str, Any], arrays: Mapping[str, Array]) -> Program:
        """The program in a message. It is not validated: a candidate may write into a buffer that it also reads.

        Raises EngineError for a malformed program.
        """
        for number in message["dropped"]:
            self._arrays.pop(number, None)
        self._arrays.update({int(name): a for name, a in arrays.items() if name != PROGRAM})
        program, _ = parse_header(arrays[PROGRAM].tobytes().decode(), message["minor"])
        numbers: Sequence[int] = message["blobs"]
        program.blobs = [np.empty(0, np.uint8) if n == NOT_SENT else self._arrays[n] for n in numbers]
        return program
