"""The same engine behind plain FastAPI, without batching: bytes of the one input in, bytes of the first output out.

OPTDNN_PLAIN=model.engine uvicorn benchmarks.serving.plain:app
"""

from __future__ import annotations

import os

import numpy as np
from fastapi import FastAPI, Request, Response
from starlette.concurrency import run_in_threadpool

import optdnn

app = FastAPI()
engine = optdnn.load(os.environ["OPTDNN_PLAIN"])
(spec,) = engine.inputs


@app.post("/infer")
async def infer(request: Request) -> Response:
    """Run the rows in the body."""
    rest = [d for d in spec.shape[1:] if isinstance(d, int)]
    x = np.frombuffer(await request.body(), spec.dtype).reshape(-1, *rest)
    results = await run_in_threadpool(engine.run, {spec.name: x})
    return Response(next(iter(results.values())).tobytes(), media_type="application/octet-stream")
