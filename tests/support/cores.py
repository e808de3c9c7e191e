"""Cores for parallel test processes: each has its own, so that the threads of one never wait for those of another."""

from __future__ import annotations

import os


def take_own_cores() -> None:
    """Bind this process, and those that it will start, to its share of the cores; one process alone keeps all."""
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if worker is None or workers == 1 or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    number = int(worker.removeprefix("gw"))
    os.sched_setaffinity(0, cores[number::workers] or [cores[number % len(cores)]])
