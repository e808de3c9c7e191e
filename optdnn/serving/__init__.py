"""``optdnn serve``: engines behind the Open Inference Protocol, with batching of requests.

The HTTP server is uvicorn, the gRPC server is gRPC's own for asyncio, and the messages are those of ``tritonclient``. What is ours
lies between them and the engines: the checks of requests, the queues, the batches, and the processes that run engines.
"""
