"""``optdnn serve``: engines behind the Open Inference Protocol, with batching of requests.

The HTTP server is uvicorn, the gRPC server is gRPC's own for asyncio, and the messages are those of ``tritonclient``. This
package has the parts between them and the engines: checks of requests, queues, batches, and the processes that run engines.
"""
