"""The kernel whose packets carry their own flags, on the processor: one process per rank, with shared memory."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import re
import struct
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.host import HERE, library, needs_compiler

from optdnn.runtime.cuda.collectives.peers import BLOCKS, ELEMENT_BYTES, FLAGGED, THREADS, Peers, blocks_of, recipe_for
from optdnn.runtime.cuda.libraries.calls import Collective

pytestmark = needs_compiler

PACKETS = """
#include <sched.h>
static inline void put_packet(char* at, const uint2& data, u32 flag) {
    u64* words = (u64*)at;
    __atomic_store_n(words, u64(flag) << 32 | data.x, __ATOMIC_RELAXED);
    __atomic_store_n(words + 1, u64(flag) << 32 | data.y, __ATOMIC_RELAXED);
}
static inline bool take_packet(uint2& data, const char* at, u32 flag) {
    const u64* words = (const u64*)at;
    const u64 first = __atomic_load_n(words, __ATOMIC_RELAXED), second = __atomic_load_n(words + 1, __ATOMIC_RELAXED);
    data.x = u32(first), data.y = u32(second);
    const bool there = u32(first >> 32) == flag && u32(second >> 32) == flag;
    if (!there) {                                  // the other threads of the block send first
        if (threadIdx.x == 0) sched_yield();
        fibers.wait(threadIdx.x);
    }
    return there;
}
static inline u32 word_now(const u32* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
static inline void tell(u32* at, u32 value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }
static inline u64 nanoseconds() { return 0; }
"""

RUN = """
static Params parameters;
extern "C" void run(const void* block, unsigned gx, unsigned threads) {
    gridDim = {gx, 1, 1};
    memcpy(&parameters, block, sizeof(Params));
    entry = [] { flagged(parameters); };
    for (unsigned x = 0; x < gx; x++) { blockIdx = {x, 0, 0}; run_block(threads, true); }
}
"""


def compiled(operation: Collective, folder: Path) -> ctypes.CDLL:
    """The kernel as a library."""
    folder.mkdir(exist_ok=True)
    texts = recipe_for("flagged", operation, "sm_90a").sources()
    machine = (HERE / "host_machine.hpp").read_text(encoding="utf-8")
    general = texts["general.cuh"].replace('#include "machine.cuh"', machine)
    general = general.replace("#define DEVICE __device__ __forceinline__", "#define DEVICE inline")
    kernel = re.sub(r"#include .*", "", texts["element.cuh"] + texts["flagged.cu"]).replace('extern "C" ', "static ")
    host = (HERE / "host.hpp").read_text(encoding="utf-8")
    text = "\n".join([host, general, PACKETS, texts["generated.cuh"], kernel, RUN])
    return library(text.replace("#pragma once", ""), folder, "-Og")


def ranks(world: int, work: Callable[[int], None]) -> list[int | None]:
    """The exit codes of processes that run ``work``, one for each rank."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work, args=(rank,)) for rank in range(world)]
    for one in processes:
        one.start()
    for one in processes:
        one.join(60)
        one.kill()
    return [one.exitcode for one in processes]


class World:
    """The memory of all ranks: inboxes, epochs, and the host's words. Processes that are forked later share it."""

    def __init__(self, world: int):
        self.world, size = world, Peers.size(world)
        shared = mmap.mmap(-1, world * size + world * 4096)
        self._bytes = np.frombuffer(shared, np.uint8)
        start = self._bytes.ctypes.data
        self.inboxes = [start + r * size for r in range(world)]
        self.epochs = [start + world * size + r * 4096 for r in range(world)]
        self.words = [at + (BLOCKS + 1) * 4 for at in self.epochs]
        self._first_word = world * size + (BLOCKS + 1) * 4

    def word(self, rank: int) -> np.ndarray:
        at = self._first_word + rank * 4096
        return self._bytes[at : at + 4].view(np.uint32)

    def launch(self, loaded: ctypes.CDLL, operation: Collective, rank: int, x: np.ndarray, y: np.ndarray) -> None:
        values = (x.ctypes.data, y.ctypes.data, *self.inboxes, self.epochs[rank], self.words[rank])
        block = struct.pack(f"<{self.world + 4}Q2I", *values, operation.count, rank)
        loaded.run(block, blocks_of("flagged", operation), THREADS)


NUMPY = {"float16": np.float16, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16}


@pytest.mark.parametrize(("world", "dtype"), [(2, "float16"), (4, "bfloat16"), (3, "float32")])
def test_sums_and_gathers_alternate(world: int, dtype: str, tmp_path: Path) -> None:
    """Launches of several sizes over the same inboxes: every rank gets the sum in the order of the ranks, or all parts."""
    size = ELEMENT_BYTES[dtype]
    most = 3 * FLAGGED // BLOCKS // size  # three blocks
    counts = [(kind, n) for n in (most, 1, most - 1, 7, 1030) for kind in ("reduce", "gather", "reduce")]
    loaded = {k: compiled(Collective(dtype, k, 8, world), tmp_path / k) for k in ("reduce", "gather")}
    memory = World(world)

    def given(step: int, rank: int, count: int) -> np.ndarray:
        return np.random.default_rng((step, rank)).standard_normal(count).astype(NUMPY[dtype])

    def work(rank: int) -> None:
        for step, (kind, count) in enumerate(counts):
            operation = Collective(dtype, kind, count, world)
            parts = [given(step, r, count) for r in range(world)]
            want = np.concatenate(parts)
            if kind == "reduce":
                total = np.zeros(count, np.float32)
                for one in parts:
                    total += one.astype(np.float32)
                want = total.astype(NUMPY[dtype])
            x, y = np.ascontiguousarray(parts[rank]), np.zeros(len(want) + 4, NUMPY[dtype])
            memory.launch(loaded[kind], operation, rank, x, y)
            assert np.array_equal(y[: len(want)].view(np.uint8), want.view(np.uint8)), f"step {step}: {kind} of {count}"
            assert not y[len(want) :].any()

    assert ranks(world, work) == [0] * world
    assert not any(memory.word(r)[0] for r in range(world))


def test_the_host_ends_a_wait_and_is_notified(tmp_path: Path) -> None:
    operation = Collective("float16", "reduce", 8, 2)
    loaded, memory = compiled(operation, tmp_path / "one"), World(2)
    memory.word(0)[0] = 255

    def alone(rank: int) -> None:
        if rank == 0:  # the other rank never launches
            memory.launch(loaded, operation, 0, np.ones(8, np.float16), np.zeros(8, np.float16))

    assert ranks(2, alone) == [0, 0]
    assert memory.word(0)[0] == 2
    memory.word(0)[0] = 0
    start = time.monotonic()
    assert ranks(2, alone) == [0, 0]
    assert memory.word(0)[0] == 0, "this GPU gave up before: it does not wait as long again"
    assert time.monotonic() - start < 30
