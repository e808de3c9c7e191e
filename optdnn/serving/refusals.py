"""The errors that a request is answered with: each has its HTTP status and the name of its gRPC status."""

from __future__ import annotations

from typing import ClassVar

from optdnn.errors import InputError, OptdnnError


class Refusal(OptdnnError):
    """A request that is not run, or whose run failed. Here: one that is malformed."""

    http: ClassVar[int] = 400
    grpc: ClassVar[str] = "INVALID_ARGUMENT"


class NotFound(Refusal):
    """There is no such model, version, output or region."""

    http = 404
    grpc = "NOT_FOUND"


class TooLarge(Refusal):
    """The request has more bytes or rows than the server takes."""

    http = 413
    grpc = "RESOURCE_EXHAUSTED"


class WrongMedia(Refusal):
    """The body is compressed."""

    http = 415


class QueueFull(Refusal):
    """The queue of the model is full."""

    http = 429
    grpc = "RESOURCE_EXHAUSTED"


class Unavailable(Refusal):
    """The model is not ready, or the server is about to end."""

    http = 503
    grpc = "UNAVAILABLE"


class WorkerLost(Unavailable):
    """The process that ran the request has died."""


class Expired(Refusal):
    """The request waited longer than it said that it would."""

    http = 504
    grpc = "DEADLINE_EXCEEDED"


class RunFailed(Refusal):
    """The engine failed on the request."""

    http = 500
    grpc = "INTERNAL"


REFUSALS: dict[str, type[Refusal]] = {
    kind.__name__: kind
    for kind in (Refusal, NotFound, TooLarge, WrongMedia, QueueFull, Unavailable, WorkerLost, Expired, RunFailed)
}
"""All of them by name."""


def refusal_of(error: BaseException) -> Refusal:
    """The refusal that answers a request after ``error``."""
    match error:
        case Refusal():
            return error
        case InputError():
            return Refusal(error.message, hint=error.hint)
        case OptdnnError():
            return RunFailed(error.message, hint=error.hint)
        case MemoryError():
            return Unavailable("there is no memory for this request")
    return RunFailed(f"{type(error).__name__}: {error}")
