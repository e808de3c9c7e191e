"""The worker process: it loads one engine, and each of its threads runs it for one instance."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from optdnn.loading import load
from optdnn.runtime.engine import Engine
from optdnn.serving.datatypes import check_served
from optdnn.serving.facts import facts_of
from optdnn.serving.tensors import fill, pad
from optdnn.serving.workers.gpu import GpuRuns, usable
from optdnn.serving.workers.memory import SharedMemory, layout_of
from optdnn.serving.workers.messages import (
    device_from,
    layout_from,
    plain_error,
    plain_layout,
    receive,
    regions_from,
    send,
)
from optdnn.types import Array


class Instance:
    """One thread's context of the engine, its connection, and its memory for inputs and outputs."""

    def __init__(self, engine: Engine, end: socket.socket, memory: tuple[int, int]):
        self._context = engine.context()
        self._end = end
        self._inputs, self._outputs = map(SharedMemory, memory)
        dtypes = {s.dtype for s in (*engine.inputs, *engine.outputs)}
        self._gpu = GpuRuns(self._context, self._inputs, self._outputs) if usable(self._context, dtypes) else None

    @property
    def on_gpu(self) -> bool:
        """Whether runs take arrays on the GPU."""
        return self._gpu is not None

    def serve(self) -> None:
        """Answer jobs until the server is gone."""
        while (message := receive(self._end)) is not None:
            if "forget" in message:
                if self._gpu is not None:
                    self._gpu.opened.close(message["forget"])
                continue
            try:
                answer: Mapping[str, Any] = {"outputs": self._run(message)}
            except Exception as error:
                answer = {"error": plain_error(error)}
            try:
                send(self._end, answer)
            except ConnectionError:  # the server did not wait for this answer
                return

    def _run(self, message: Mapping[str, Any]) -> list[Any]:
        feeds = self._inputs.arrays(layout_from(message["inputs"]))
        if self._gpu is not None:
            return self._run_on_gpu(self._gpu, feeds, message)
        fill(feeds, regions_from(message["regions"]))
        pad(feeds, message["rows"])
        results: Mapping[str, Any] = self._context.run(feeds)
        layout = layout_of({name: (a.dtype, a.shape) for name, a in results.items()})
        for name, target in self._outputs.arrays(layout).items():
            target[...] = results[name]
        return plain_layout(layout)

    def _run_on_gpu(self, gpu: GpuRuns, feeds: Mapping[str, Array], message: Mapping[str, Any]) -> list[Any]:
        parts, wanted = device_from(message)
        copied = []
        for name, row, part in regions_from(message["regions"]):
            if gpu.reads(part, feeds[name].dtype):
                parts.append((name, row, part))
            else:
                copied.append((name, row, part))
        fill(feeds, copied)
        pad(feeds, message["rows"])
        results = gpu.run(feeds, parts, message["rows"])
        layout = layout_of({name: (a.dtype, a.shape) for name, a in results.items()})
        gpu.copy_out(results, self._outputs.arrays(layout), wanted, message["rows"])
        return plain_layout(layout)


def main() -> None:
    """The process: its argument says what to load, and which descriptors belong to each instance."""
    order = json.loads(sys.argv[1])
    ends = [socket.socket(fileno=row[0]) for row in order["instances"]]
    try:
        engine = load(order["engine"], **order["options"])
        check_served((*engine.inputs, *engine.outputs))
        instances = [Instance(engine, end, (row[1], row[2])) for end, row in zip(ends, order["instances"], strict=True)]
        facts = replace(facts_of(engine), device_memory=instances[0].on_gpu)
        told: dict[str, Any] = {"facts": facts.to_plain()}
    except Exception as error:
        told = {"error": plain_error(error)}
    try:
        send(ends[0], told)
    except ConnectionError:  # the server did not wait: it ends because of another model
        os._exit(0)
    if "error" in told:
        return
    threads = [threading.Thread(target=i.serve, daemon=True) for i in instances]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os._exit(0)  # the server is gone: nothing of this process is wanted any more


if __name__ == "__main__":
    main()
