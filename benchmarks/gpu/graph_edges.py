"""What edges of a CUDA graph cost: chains, forks and joins of small kernels, with full and with programmatic dependencies.

    python benchmarks/gpu/graph_edges.py OUT.json

Each kernel asks for its dependents at once, waits for its predecessors (griddepcontrol.wait), checks that the nodes it depends on
have written this run's number, spins for a given time, then writes its own: a dependency that does not order counts as an error.
In the rows "uneven" the branches spin for very different times.
"""

from __future__ import annotations

import json
import statistics
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np

from optdnn.runtime.cuda.device import Device, Function, Launch, check, driver
from optdnn.runtime.cuda.graphs import Stream, time_runs
from optdnn.runtime.cuda.memory import DeviceMemory
from optdnn.runtime.cuda.nvrtc import Recipe, compile_recipe

SOURCE = r"""
struct P { volatile int* flags; int* errors; int me, count; int spin; int reads[8]; };
extern "C" __global__ void node(const __grid_constant__ P p) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    int run = p.flags[0];
    if (threadIdx.x == 0)
        for (int i = 0; i < p.count; ++i)
            if (p.flags[(p.reads[i] + 1) * 1024 + blockIdx.x] != run) atomicAdd(p.errors, 1);
    long long c = clock64();
    while (clock64() - c < p.spin) {}
    if (threadIdx.x == 0) p.flags[(p.me + 1) * 1024 + blockIdx.x] = run;
    __syncthreads();
}
extern "C" __global__ void next_run(const __grid_constant__ P p) { if (threadIdx.x == 0) p.flags[0] += 1; }
"""
NODES = 64


def cubin(arch: str) -> bytes:
    return compile_recipe(Recipe("edges.cu", arch, {"edges.cu": SOURCE}, ("--std=c++17",)))[0]


def block(flags: int, errors: int, me: int, reads: list[int], spin: int) -> bytes:
    return struct.pack("<QQiii8i4x", flags, errors, me, len(reads), spin, *(reads + [0] * 8)[:8])


Net = list[tuple[list[int], str]]
"""For each node those it depends on, and how: "full", "programmatic" (each edge), "attribute" (the launch's attribute),
"blind" (on the first alone: the fault that the check must see)."""


def chain(n: int, how: str) -> Net:
    return [([k - 1] if k else [], how) for k in range(n)]


def diamonds(n: int, width: int, length: int, fork: str, join: str, inner: str) -> Net:
    """``n`` times: a node, ``width`` branches of ``length`` nodes, whose ends the next one waits for."""
    net: Net = [([], "full")]
    ends = [0]
    for _ in range(n):
        if len(ends) > 1:
            net.append((ends, join))
            ends = [len(net) - 1]
        root, ends = ends[0], []
        for _ in range(width):
            last = root
            for k in range(length):
                net.append(([last], fork if k == 0 else inner))
                last = len(net) - 1
            ends.append(last)
    net.append((ends, join))
    return net


def bipartite(n: int, width: int, length: int, how: str) -> Net:
    """``n`` times: ``width`` branches of ``length`` nodes, each of which waits for the ends of all the last ones."""
    net: Net = [([], "full")]
    ends = [0]
    for _ in range(n):
        new = []
        for _ in range(width):
            deps, kind = list(ends), how
            for _ in range(length):
                net.append((deps, kind))
                deps, kind = [len(net) - 1], "attribute"
            new.append(len(net) - 1)
        ends = new
    net.append((list(ends), how))
    return net


def through_empty(n: int, width: int) -> Net:
    """As :func:`bipartite` with branches of one node, with an empty node between."""
    net: Net = [([], "full")]
    ends = [0]
    for _ in range(n):
        if len(ends) > 1:
            net.append((ends, "empty"))
            ends = [len(net) - 1]
        net += [(ends, "full") for _ in range(width)]
        ends = list(range(len(net) - width, len(net)))
    net.append((ends, "attribute"))
    return net


def edge_data(kind: str) -> Any:
    cu = driver()
    found = cu.CUgraphEdgeData()
    if kind == "programmatic":
        found.from_port = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
        found.type = int(cu.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC)
    return found


class Bench:
    def __init__(self) -> None:
        self.device = Device.open()
        code = cubin(self.device.arch)
        self.function, self.bump = Function(code, "node"), Function(code, "next_run")
        self.stream = Stream()
        self.flags = DeviceMemory((NODES * 4 + 1) * 1024 * 4, "flags")
        self.errors = DeviceMemory(256, "errors")
        for m in (self.flags, self.errors):
            m.upload(np.zeros(m.size, np.uint8), 0)

    def graph(self, net: Net, blocks: int, spins: list[int]) -> tuple[Any, list[str]]:
        cu, handle = driver(), self.stream.handle
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check("begin", cu.cuStreamBeginCapture(handle, mode))
        nodes: list[Any] = []
        keep: list[Launch] = []

        def add(launch: Launch, deps: list[int], kind: str) -> None:
            keep.append(launch)
            wanted = [nodes[d] for d in deps]
            data = [edge_data(kind) for _ in deps]
            flag = cu.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES
            check("update", cu.cuStreamUpdateCaptureDependencies(handle, wanted, data, len(wanted), flag))
            launch.enqueue(handle)
            _, _, _, last, *_ = check("info", cu.cuStreamGetCaptureInfo(handle))
            assert len(last) == 1
            nodes.append(last[0])

        try:
            bump = block(self.flags.pointer, self.errors.pointer, 0, [], 0)
            add(Launch(self.bump, (1, 1, 1), 32, [bump], dependent=False), [], "full")
            for k, (deps, kind) in enumerate(net):
                if kind == "empty":
                    _, _, whole, *_ = check("info", cu.cuStreamGetCaptureInfo(handle))
                    wanted = [nodes[d + 1] for d in deps]
                    nodes.append(check("empty", cu.cuGraphAddEmptyNode(whole, wanted, len(wanted))))
                    continue
                seen = [d for d in deps if net[d][1] != "empty"]
                p = block(self.flags.pointer, self.errors.pointer, k, seen, spins[k])
                launch = Launch(self.function, (blocks, 1, 1), 128, [p], dependent=kind == "attribute")
                kept = deps[:1] if kind == "blind" else deps
                add(launch, [d + 1 for d in kept] if kept else [0], kind if kept else "full")
        finally:
            graph = check("end", cu.cuStreamEndCapture(handle))
        *_, data, count = check("edges", cu.cuGraphGetEdges(graph, 4096))
        kinds = sorted({f"{d.from_port}>{d.to_port}:{d.type}" for d in data[:count]})
        executable = check("instantiate", cu.cuGraphInstantiate(graph, 0))
        self._keep = keep
        return executable, kinds

    def time(self, name: str, net: Net, blocks: int, spin: int, *, uneven: bool = False) -> dict[str, Any]:
        cu = driver()
        spins = [spin * (1 + 7 * (k * 5 % 3)) if uneven else spin for k in range(len(net))]
        try:
            executable, kinds = self.graph(net, blocks, spins)
        except Exception as error:  # what the driver refuses is a result, too
            print(f"{name:40s} refused: {error}", flush=True)
            return {"name": name, "refused": str(error)}
        self.errors.upload(np.zeros(64, np.uint8), 0)
        run = lambda: check("launch", cu.cuGraphLaunch(executable, self.stream.handle))  # noqa: E731
        times = time_runs(run, self.stream, warmup=5, repeats=15, inner=5)
        found = np.zeros(1, np.int32)
        check("copy", cu.cuMemcpyDtoH(found.ctypes.data, self.errors.pointer, 4))
        us = statistics.median(times) * 1e3
        print(
            f"{name:40s} blocks {blocks:4d} {us:9.2f} us  {us / len(net):6.3f} a node  edge types {kinds}  errors {found[0]}",
            flush=True,
        )
        check("destroy", cu.cuGraphExecDestroy(executable))
        return {
            "name": name,
            "blocks": blocks,
            "spin": spin,
            "nodes": len(net),
            "us": us,
            "edges": kinds,
            "errors": int(found[0]),
        }


def main() -> None:
    out = Path(sys.argv[1])
    bench, rows = Bench(), []
    for spin in (0, 3000):
        for blocks in (16,):

            def go(name: str, net: Net, spin: int = spin, blocks: int = blocks) -> None:
                rows.append(bench.time(f"{name} spin {spin}", net, blocks, spin))

            go("empty", [([], "full")])
            for how in ("full", "attribute", "programmatic"):
                go(f"chain 33 {how}", chain(33, how))
            for fork, join in (
                ("full", "full"),
                ("attribute", "full"),
                ("programmatic", "full"),
                ("attribute", "attribute"),
                ("attribute", "programmatic"),
            ):
                go(f"diamonds 8x 2x1 {fork}/{join}", diamonds(8, 2, 1, fork, join, "attribute"))
                go(f"diamonds 8x 4x1 {fork}/{join}", diamonds(8, 4, 1, fork, join, "attribute"))
                go(f"diamonds 8x 4x3 {fork}/{join}", diamonds(8, 4, 3, fork, join, "attribute"))
            for how in ("full", "attribute", "programmatic"):
                go(f"bipartite 6x 4x2 {how}", bipartite(6, 4, 2, how))
                go(f"bipartite 12x 2x1 {how}", bipartite(12, 2, 1, how))
            go("bipartite 12x 2x1 through empty nodes", through_empty(12, 2))
    for blocks in (66, 132, 264, 528):
        rows.append(
            bench.time(
                "diamonds 8x 4x1 attribute/full spin 3000",
                diamonds(8, 4, 1, "attribute", "full", "attribute"),
                blocks,
                3000,
            )
        )
        rows.append(bench.time("chain 41 attribute spin 3000", chain(41, "attribute"), blocks, 3000))
    rows.append(
        bench.time(
            "uneven diamonds 8x 4x1, joins blind", diamonds(8, 4, 1, "full", "blind", "full"), 16, 2000, uneven=True
        )
    )
    for how in ("full", "attribute", "programmatic"):
        for blocks in (16, 264):
            rows.append(
                bench.time(f"uneven diamonds 8x 4x1 {how}", diamonds(8, 4, 1, how, how, how), blocks, 2000, uneven=True)
            )
            rows.append(
                bench.time(f"uneven diamonds 8x 3x2 {how}", diamonds(8, 3, 2, how, how, how), blocks, 2000, uneven=True)
            )
            rows.append(
                bench.time(f"uneven bipartite 6x 4x2 {how}", bipartite(6, 4, 2, how), blocks, 2000, uneven=True)
            )
    out.write_text(json.dumps({"device": bench.device.name, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
