"""Separate cores for parallel test processes, so that threads of one never wait for threads of another."""

from __future__ import annotations

import os


def take_own_cores() -> None:
    """Bind this process and its later children to its share of the cores. A single process keeps all cores."""
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER"), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if worker is None or workers == 1 or not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0))
    number = int(worker.removeprefix("gw"))
    os.sched_setaffinity(0, cores[number::workers] or [cores[number % len(cores)]])
