"""The floor of gRPC: servers that read a request's bytes and answer with as many bytes as an engine would, and do nothing else.

``python -m benchmarks.serving.echo BYTES PROCESSES``: answers have BYTES bytes, and PROCESSES processes share the port, as front
ends do.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import grpc
import uvloop
from tritonclient.grpc import service_pb2 as pb

from optdnn.serving.listeners import new_grpc_server, reserve
from optdnn.serving.malloc import keep_freed_memory
from optdnn.serving.settings import ServeSettings


async def answer_on(port: int, nbytes: int) -> None:
    """One server, with the options of optdnn serve."""
    answer = pb.ModelInferResponse(raw_output_contents=[bytes(nbytes)]).SerializeToString()

    async def infer(data: bytes, context: Any) -> bytes:
        return answer

    server, _ = new_grpc_server(ServeSettings([], grpc_port=port), shared=True)
    name = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].full_name
    methods = {"ModelInfer": grpc.unary_unary_rpc_method_handler(infer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, methods),))
    await server.start()
    print("ready", flush=True)
    await server.wait_for_termination()


def main(nbytes: int, processes: int, port: int = 0) -> None:
    """The processes; with a port, one of them."""
    if port:
        keep_freed_memory()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(answer_on(port, nbytes))
        return
    with reserve("127.0.0.1", 0) as reserved:
        taken = reserved.getsockname()[1]
        words = [sys.executable, "-m", "benchmarks.serving.echo", str(nbytes), "1", str(taken)]
        running = [subprocess.Popen(words, stdout=subprocess.PIPE) for _ in range(processes)]
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()
        print(f"echo on http://nowhere and by gRPC on 127.0.0.1:{taken}", flush=True)
        try:
            sys.stdin.read()
        finally:
            for process in running:
                process.kill()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
