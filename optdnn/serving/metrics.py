"""The metrics of the server, in Prometheus' format."""

from __future__ import annotations

from functools import cache

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "optdnn_requests", "Requests, by model, protocol and status.", ("model", "protocol", "status"), registry=r
        )
        self.seconds = Histogram(
            "optdnn_request_seconds",
            "From a request's last byte to its answer.",
            ("model",),
            buckets=SECONDS,
            registry=r,
        )
        self.waited = Histogram("optdnn_queue_seconds", "Time in the queue.", ("model",), buckets=SECONDS, registry=r)
        self.ran = Histogram(
            "optdnn_run_seconds", "Time of a batch in a worker.", ("model",), buckets=SECONDS, registry=r
        )
        self.rows = Histogram("optdnn_batch_rows", "Rows of requests in a batch.", ("model",), buckets=ROWS, registry=r)
        self.padding = Counter("optdnn_padding_rows", "Rows that batches were padded with.", ("model",), registry=r)
        self.queue = Gauge("optdnn_queue_length", "Pieces of requests that wait.", ("model",), registry=r)
        self.lost = Counter("optdnn_workers_lost", "Worker processes that died.", ("model",), registry=r)

        self._requests = cache(self.requests.labels)
        self._seconds = cache(self.seconds.labels)

    def request(self, model: str, protocol: str, status: str, seconds: float) -> None:
        """Count a request to a model, or to none by this name (""), and its time. Label values are looked up once."""
        self._requests(model, protocol, status).inc()
        if model:
            self._seconds(model).observe(seconds)

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        found: bytes = generate_latest(self.registry)
        return found

    def of(self, model: str) -> ModelMetrics:
        """Those of one model."""
        return ModelMetrics(self, model)


class ModelMetrics:
    """The metrics of one model; label values are looked up once."""

    def __init__(self, metrics: Metrics, model: str):
        self.waited = metrics.waited.labels(model).observe
        self.ran = metrics.ran.labels(model).observe
        self.queue = metrics.queue.labels(model).set
        self.lost = metrics.lost.labels(model).inc
        self._rows = metrics.rows.labels(model).observe
        self._padding = metrics.padding.labels(model).inc

    def batch(self, rows: int, size: int) -> None:
        """Note a batch of ``rows`` rows that is padded to ``size``."""
        self._rows(rows)
        self._padding(size - rows)
