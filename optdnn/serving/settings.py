"""The settings of a server: the models, the ports, and how requests are queued and run."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optdnn.errors import UsageError, did_you_mean

SUFFIX = ".engine"


@dataclass(frozen=True)
class ServeSettings:
    """The settings of one server. Raises UsageError for invalid values."""

    paths: Sequence[Path]
    """Engine files, or one folder of them."""
    host: str = "127.0.0.1"
    http_port: int = 8000
    """0: any free port."""
    grpc_port: int = 8001
    batch_delay_ms: float = 0.0
    """How long a request waits for others to share a batch with."""
    max_batch: int | None = None
    """Largest number of rows of a batch. None: as many as the engine has plans for."""
    workers: int = 1
    """Processes per model. 0: threads of the server's process."""
    instances: int = 1
    """Batches that a worker runs concurrently."""
    gpus: Sequence[int] = ()
    """The GPUs that the workers of a model are spread over. Empty: the environment's GPU."""
    queue: int = 256
    """Most requests of a model that wait."""
    shared_memory: bool = False
    """Whether clients may name system shared memory of this machine for tensors."""
    frontends: int = 0
    """Processes that speak HTTP and gRPC. 0: the server's own process does."""
    drain_seconds: float = 30.0
    """How long the server waits for its requests before it ends."""
    loading: Mapping[str, Any] = field(default_factory=dict)
    """Options of :func:`optdnn.load`."""

    def __post_init__(self) -> None:
        for name, low, high in (("http_port", 0, 65535), ("grpc_port", 0, 65535), ("workers", 0, 64), ("instances", 1, 64),
                                ("frontends", 0, 64), ("queue", 1, 1_000_000), ("batch_delay_ms", 0, 60_000),
                                ("drain_seconds", 0, 86_400)):  # fmt: skip
            value = getattr(self, name)
            if not math.isfinite(value) or not low <= value <= high:
                raise UsageError(f"{name} must be {low} to {high}, not {value}")
        if self.max_batch is not None and self.max_batch < 1:
            raise UsageError(f"max_batch must be 1 or more, not {self.max_batch}")
        if self.http_port == self.grpc_port != 0:
            raise UsageError(f"HTTP and gRPC cannot both listen on port {self.http_port}")
        if self.gpus and not self.workers:
            raise UsageError("threads of one process run on one GPU", hint="leave --gpus out, or give --workers")
        if any(g < 0 for g in self.gpus):
            raise UsageError(f"gpus must be numbers of GPUs, not {', '.join(map(str, self.gpus))}")

    @property
    def folder(self) -> Path | None:
        """The folder of models, where one was given."""
        return self.paths[0] if len(self.paths) == 1 and self.paths[0].is_dir() else None

    def models(self) -> dict[str, Path]:
        """Name -> file of all current models. Raises UsageError for a path without a file, and for two files of one name."""
        if self.folder is not None:
            return engines_in(self.folder)
        found: dict[str, Path] = {}
        for path in self.paths:
            if path.is_dir():
                raise UsageError(f"{path} is a folder", hint="serve one folder, or engine files")
            if not path.is_file():
                meant = did_you_mean(path.name, [p.name for p in path.parent.glob("*" + SUFFIX)])
                raise UsageError(f"there is no file {path}", hint=meant)
            if path.stem in found:
                raise UsageError(f"{found[path.stem]} and {path} would both be the model {path.stem!r}")
            found[path.stem] = path
        if not found:
            raise UsageError("there is no model to serve", hint="optdnn serve model.engine")
        return found


def usual_frontends() -> int:
    """The front ends of a server on this machine: half of its cores, at most 8; none on less than 4 cores."""
    cores = len(os.sched_getaffinity(0))
    return min(8, cores // 2) if cores >= 4 else 0


def engines_in(folder: Path) -> dict[str, Path]:
    """Name -> file of the engines in a folder."""
    return {path.stem: path for path in sorted(folder.glob("*" + SUFFIX)) if path.is_file()}
