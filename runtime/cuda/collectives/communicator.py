"""Collectives on GPUs: NCCL's, and for small arrays our kernels over peer memory (``flagged.cu``, ``all_reduce.cu``).

A process is one rank, and has one communicator, which all ranks create together. For each sum or gather, the faster
implementation is found by measurement when the first context that needs it is created. All ranks use the implementation
whose slowest rank is fastest. NVLink multicast is never used.

NCCL comes through nccl4py's low-level bindings, which add little to a call and can abort a communicator from another thread.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from optdnn.errors import MissingDependency, OptdnnError, RankError, RunError
from optdnn.runtime.cuda.allocator import DeviceMemory, PinnedMemory
from optdnn.runtime.cuda.collectives.handle import Handle
from optdnn.runtime.cuda.collectives.peers import ELEMENT_BYTES, LIMIT_NS, WORLDS, Peers, ways
from optdnn.runtime.cuda.device import Device, Launch, check, choose, driver, gpu_count
from optdnn.runtime.cuda.launches.graphs import Graph, Stream, time_runs
from optdnn.runtime.cuda.libraries.calls import Called, Collective
from optdnn.runtime.cuda.libraries.ranks import using
from optdnn.runtime.ranks.group import Group, bytes_of

TYPES = {"float16": 6, "float32": 7, "bfloat16": 9}
"""Element type -> NCCL's number."""
SUM = 0
START_S = 60.0
TRIALS, REPEATS = 20, 7


def bindings() -> ModuleType:
    """nccl4py's low-level bindings. Raises MissingDependency."""
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    try:
        module = importlib.import_module("nccl.bindings.nccl")
        module.get_version()
    except (ImportError, RuntimeError) as error:
        raise MissingDependency("nccl4py", "multi-gpu", "to run on several GPUs") from error
    return module


def check_gpus(world: int) -> None:
    """Raise RankError if this machine has fewer GPUs than ranks to start."""
    if (there := gpu_count()) < world:
        raise RankError(
            f"the engine is for {world} GPUs; this machine has {there}",
            hint=f"build it with --devices {there}"
            if there > 1
            else "build it for one device, or run it in NumPy: optdnn run --simulate, optdnn.load(..., simulate=True)",
        )


def connect(group: Group, local: int) -> Communicator:
    """This process's communicator, on GPU ``local`` of this host; all ranks of ``group`` create theirs together.

    Raises RankError on every rank if their GPUs do not fit together, MissingDependency if NCCL is missing.
    """
    device, nccl = _device(group, local)
    return Communicator(group, device, nccl)


def _device(group: Group, local: int) -> tuple[Device, ModuleType]:
    """The GPU of this rank, and the bindings, once every rank has them and can access the others' memory."""
    device: Device | None = None
    nccl: ModuleType | None = None
    facts: dict[str, Any] = {"why": None, "host": socket.gethostname(), "place": ""}
    try:
        if local >= (there := gpu_count()):
            raise RankError(f"rank {group.rank} is to run on GPU {local}; {facts['host']} has {there}")
        choose(local)
        device, nccl = Device.open(), bindings()
        facts["place"] = device.place
    except OptdnnError as error:
        facts["why"] = error.message
    all_facts = [m for m, _ in group.exchange(facts)]
    _raise_first(all_facts)
    assert device is not None
    assert nccl is not None
    why = _unreachable(group.rank, device, all_facts)
    _raise_first([m for m, _ in group.exchange({"why": why})])
    return device, nccl


def _raise_first(answers: list[dict[str, Any]]) -> None:
    for answer in answers:
        if answer["why"] is not None:
            raise RankError(answer["why"])


def _unreachable(rank: int, device: Device, facts: list[dict[str, Any]]) -> str | None:
    """Why this GPU and the GPUs of the other ranks of its host cannot work together, or None."""
    cu = driver()
    own = check("cuDeviceGet", cu.cuDeviceGet(device.index))
    for other, fact in enumerate(facts):
        if other == rank or fact["host"] != facts[rank]["host"]:
            continue
        if fact["place"] == device.place:
            return f"ranks {min(rank, other)} and {max(rank, other)} are on the same GPU, {device.place}"
        status, there = cu.cuDeviceGetByPCIBusId(fact["place"].encode())
        if status != cu.CUresult.CUDA_SUCCESS:
            return f"rank {rank} does not see the GPU {fact['place']} of rank {other} (CUDA_VISIBLE_DEVICES hides it?)"
        if not check("cuDeviceCanAccessPeer", cu.cuDeviceCanAccessPeer(own, there)):
            pair = f"{device.place} and {fact['place']}"
            return f"the GPUs of ranks {rank} and {other}, {pair}, have no access to each other's memory"
    return None


class Communicator:
    """The collectives of one rank. Methods that say so must be called by all ranks together."""

    def __init__(self, group: Group, device: Device, nccl: ModuleType):
        self.group, self.device, self._nccl = group, device, nccl
        self._closing, self._closed = threading.Lock(), False
        self._context = check("cuCtxGetCurrent", driver().cuCtxGetCurrent())
        self._word = PinnedMemory(4)
        self.word[:] = 0
        unique = bytes(nccl.get_unique_id()) if group.rank == 0 else bytes(128)
        shared = group.exchange({}, {"id": bytes_of(unique)})[0][1]["id"].tobytes()
        self._comm = self._started(bytearray(shared))
        group.when_lost(self.abort)
        self._prepared: dict[Collective, Prepared] = {}
        self.peers: Peers | None = None
        self.no_peers = self._reach_peers()
        """Why there is no kernel over peer memory; "" if there is one."""
        self.facts: dict[str, Any] = {}
        """For each measured collective, the microseconds of each implementation."""

    def make_current(self) -> None:
        """Make this rank's GPU current on the calling thread, for the driver."""
        check("cuCtxSetCurrent", driver().cuCtxSetCurrent(self._context))

    def activate(self) -> None:
        """Make this rank's GPU current on the calling thread, for the driver and for CuPy."""
        self.make_current()
        if (cupy := sys.modules.get("cupy")) is not None:
            cupy.cuda.Device(self.device.index).use()

    @contextmanager
    def here(self) -> Iterator[None]:
        """A ``with`` block for this rank's work: on its GPU, with its collectives."""
        self.activate()
        with using(self):
            yield

    @property
    def word(self) -> Any:
        """The host's word that waiting kernels read."""
        return self._word.bytes.view(np.uint32)

    def _started(self, unique: bytearray) -> Handle:
        """NCCL's communicator. If another rank is lost meanwhile, nothing ends NCCL's wait: the communicator is left in its
        thread."""

        def make() -> Any:
            self.activate()
            return self._nccl.comm_init_rank_scalable(self.group.world, self.group.rank, 1, unique, 0)

        handle, end = Handle(make, self._nccl.comm_abort), time.monotonic() + START_S
        while not handle.made.wait(0.1) and time.monotonic() < end:
            self.group.check()
        if handle.value is None or isinstance(handle.value, Exception):
            said = f" within {START_S:g} s" if handle.value is None else f": {handle.value}"
            raise RankError(f"NCCL could not connect rank {self.group.rank} of {self.group.world}{said}")
        return handle

    def _reach_peers(self) -> str:
        if self.group.world not in WORLDS:
            return f"it is for {WORLDS[0]} to {WORLDS[-1]} ranks"
        try:
            own, why = DeviceMemory(Peers.size(self.group.world), "inboxes of other ranks"), ""
            own.clear()
            shared = bytes(check("cuIpcGetMemHandle", driver().cuIpcGetMemHandle(own.pointer)).reserved)
        except OptdnnError as error:
            own, why, shared = None, error.message, bytes(64)
        answers = self.group.exchange({"why": why, "host": socket.gethostname()}, {"handle": bytes_of(shared)})
        hosts = {m["host"] for m, _ in answers}
        why = next((m["why"] for m, _ in answers if m["why"]), "" if len(hosts) == 1 else "ranks are on several hosts")
        peers: Peers | None = None
        if not why and own is not None:
            handles = [a["handle"].tobytes() for _, a in answers]
            try:
                peers = Peers(own, handles, self.group.rank, self.device.arch, self._word.pointer)
            except OptdnnError as error:
                why = error.message
        all_why = [m["why"] for m, _ in self.group.exchange({"why": why})]
        self.peers = peers if not any(all_why) else None
        return next((w for w in all_why if w), "")

    # ---------------------------------------------------------------- calls

    def prepare(self, operation: Collective) -> Prepared:
        """A collective, prepared by all ranks together; measurements choose the faster implementation."""
        if operation.world != self.group.world:
            raise RankError(f"a collective of the engine is for {operation.world} ranks; {self.group.world} run")
        if operation not in self._prepared:
            self._prepared[operation] = self._choose(operation)
        return self._prepared[operation]

    def _choose(self, operation: Collective) -> Prepared:
        size = operation.count * ELEMENT_BYTES[operation.dtype]
        parts = operation.world if operation.kind == "gather" else 1
        x, y = (DeviceMemory(n, "a trial of a collective") for n in (size, size * parts))
        x.clear()
        at = {"x": x.pointer, "y": y.pointer}
        offered = {"nccl": Prepared(self, operation, None)}
        times = {"nccl": self._microseconds(offered["nccl"].bind(at))}
        for way in ways(operation) if self.peers is not None else ():
            offered[way] = Prepared(self, operation, way)
            times[way] = self._microseconds(offered[way].bind(at))
        if len(offered) == 1:
            return offered["nccl"]
        answers = [m for m, _ in self.group.exchange(times)]
        slowest = {name: max(m[name] for m in answers) for name in times}
        kind = "" if operation.kind == "reduce" else f"{operation.kind} of "
        self.facts[f"{kind}{operation.dtype}[{operation.count}]"] = slowest
        forced = os.environ.get("OPTDNN_ALL_REDUCE", "")
        return offered[forced if forced in slowest else min(slowest, key=lambda name: slowest[name])]

    def _microseconds(self, call: Called | Launch) -> float:
        """The time of one call in a graph of :data:`TRIALS` calls; all ranks measure together."""
        stream = Stream()
        call.enqueue(stream.handle)
        stream.synchronize()
        graph = Graph([call] * TRIALS, stream)
        times = time_runs(lambda: graph.replay(stream), stream, warmup=3, repeats=REPEATS)
        graph.close()
        self.group.check()
        return 1000 * sorted(times)[len(times) // 2] / TRIALS

    def enqueue(self, operation: Collective, x: int, y: int, stream: int) -> None:
        """One call of NCCL on the stream with this handle."""
        kind = TYPES[operation.dtype]
        try:
            if operation.kind == "reduce":
                self._nccl.all_reduce(x, y, operation.count, kind, SUM, self._comm.value, stream)
            else:
                self._nccl.all_gather(x, y, operation.count, kind, self._comm.value, stream)
        except Exception as error:
            self.group.check()
            raise RunError(f"NCCL refused a collective: {error}") from error

    def check(self) -> None:
        """Raise RankError if a kernel gave up waiting for another rank, or if this rank has left."""
        if self._closed:
            raise RankError(f"rank {self.group.rank} has left the others", hint="load the engine again")
        if found := int(self.word[0]):
            why = f"rank {self.group.rank} waited for rank {found - 1} for more than {LIMIT_NS / 1e9:g} s"
            self.group.fail(why)
            raise RankError(why, hint="load the engine again")

    def abort(self) -> None:
        """End all collectives that wait for a lost rank."""
        self.close()

    def close(self) -> None:
        """End the work that still waits on this GPU, and begin to free NCCL's memory; the ranks need not do it together.

        NCCL ends its kernels immediately, and then waits for the end of all graphs that contain its calls."""
        with self._closing:
            if not self._closed:
                self.word[:] = 255
            self._closed = True
        self._comm.free()


class Prepared:
    """A prepared collective: our kernel (``way``), or NCCL."""

    workspace = 0

    def __init__(self, communicator: Communicator, operation: Collective, way: str | None):
        self._communicator, self._operation, self._way = communicator, operation, way

    def bind(self, addresses: Mapping[str, int], scratch: int = 0, *, dependent: bool = False) -> Called | Launch:
        """The call on these addresses. ``dependent``: our kernel may be launched early."""
        x, y, one = addresses["x"], addresses["y"], self._operation
        if self._way is not None and x % 16 == 0 and y % 16 == 0:
            peers = self._communicator.peers
            assert peers is not None
            return peers.launch(self._way, one, x, y, dependent)
        enqueue: Callable[[int], None] = lambda stream: self._communicator.enqueue(one, x, y, stream)  # noqa: E731
        return Called(enqueue)
