"""The rank of this process, if a launcher started several: torchrun, MPI, or the user's own variables."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from optdnn.errors import RankError, UsageError
from optdnn.runtime.file.atomic import write_atomic
from optdnn.runtime.ranks.group import JOIN_S, Group, Hub, join

_NAMES = (("RANK", "WORLD_SIZE", "LOCAL_RANK"),
          ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"))  # fmt: skip
RENDEZVOUS = "OPTDNN_RENDEZVOUS"
"""Environment variable: HOST:PORT of rank 0, or a file to which rank 0 writes its address."""


@dataclass(frozen=True)
class Place:
    """Rank ``rank`` of ``world`` on GPU ``local`` of its host. ``rendezvous``: HOST:PORT, or a file."""

    rank: int
    world: int
    local: int
    rendezvous: str


def place_of(env: Mapping[str, str] | None = None) -> Place | None:
    """This process's place; None if no launcher started several. Raises UsageError for variables that contradict."""
    env = os.environ if env is None else env
    for rank_name, world_name, local_name in _NAMES:
        if rank_name not in env or world_name not in env:
            continue
        try:
            rank, world = int(env[rank_name]), int(env[world_name])
            local = int(env.get(local_name, rank))
            port = int(env.get("MASTER_PORT", "29500")) + 1
        except ValueError as error:
            raise UsageError(
                f"{rank_name}, {world_name}, {local_name} or MASTER_PORT is not a number: {error}"
            ) from error
        if world == 1:
            return None
        if not 0 <= rank < world or local < 0:
            raise UsageError(f"{rank_name} is {rank} and {world_name} {world}")
        rendezvous = env.get(RENDEZVOUS) or (f"{env['MASTER_ADDR']}:{port}" if "MASTER_ADDR" in env else "")
        if not rendezvous:
            raise UsageError(
                f"{rank_name} says that this is rank {rank} of {world}, and nothing says where rank 0 is",
                hint=f"set {RENDEZVOUS} to HOST:PORT of rank 0, or to a file that all ranks see",
            )
        return Place(rank, world, local, rendezvous)
    return None


def meet(place: Place, limit: float = JOIN_S) -> Group:
    """The group of all ranks that the launcher started. Raises RankError if they do not find one another."""
    host, colon, port = place.rendezvous.rpartition(":")
    if colon and port.isdigit():
        if place.rank == 0:
            return Hub(place.world, host, int(port), "").accept(limit=limit)
        return join((host, int(port)), place.rank, place.world, "", limit)
    file = Path(place.rendezvous)
    if place.rank == 0:
        hub = Hub(place.world)
        write_atomic(file, [f"{hub.address[0]}:{hub.address[1]} {hub.token}".encode()])
        try:
            return hub.accept(limit=limit)
        finally:
            file.unlink(missing_ok=True)
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if file.exists():
            address, _, token = file.read_text().partition(" ")
            host, _, port = address.rpartition(":")
            return join((host, int(port)), place.rank, place.world, token, end - time.monotonic())
        time.sleep(0.05)
    raise RankError(f"rank 0 wrote no address to {file} within {limit:g} s")
