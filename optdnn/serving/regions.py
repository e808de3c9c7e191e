"""Shared memory that clients have registered for their tensors, in the protocol's extensions: the system's, and that of GPUs.

A client names memory of this machine, and the server reads and writes it: that is for clients that are trusted with every shared
memory of this user. So the server offers it only where it was asked to (``optdnn serve --shared-memory``).
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from optdnn.serving.refusals import NotFound, Refusal
from optdnn.serving.tensors import SHARED, DeviceSlice, RegionSlice, open_shared

_KEY = re.compile(r"/?([A-Za-z0-9_][A-Za-z0-9_.-]{0,200})")
MOST = 4096
"""Most regions that are registered at once."""
HANDLE_BYTES = 64
"""CUDA's handle of memory for other processes (cudaIpcMemHandle_t)."""


@dataclass(frozen=True)
class Region:
    """A registered region: the name of its file, the first byte, and their number."""

    key: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class DeviceRegion:
    """A registered region of a GPU: its handle as base64, the client's number of the GPU, and its bytes."""

    handle: str
    device: int
    nbytes: int


@dataclass(frozen=True)
class NamedPart:
    """A part of a region as a client names it; nothing of it is checked."""

    region: Any
    offset: Any
    nbytes: Any

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> NamedPart | None:
        """The part that a tensor's parameters name; None where they name no region."""
        name = parameters.get("shared_memory_region")
        if name is None:
            return None
        return cls(name, parameters.get("shared_memory_offset", 0), parameters.get("shared_memory_byte_size"))


_Kind = TypeVar("_Kind", Region, DeviceRegion)


class Regions:
    """The registered regions by name."""

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self._found: dict[str, Region | DeviceRegion] = {}

    def register(self, name: str, key: Any, offset: Any, nbytes: Any) -> None:
        """Register a region. Raises Refusal where there is no such memory, or less of it."""
        self._check_enabled()
        match = _KEY.fullmatch(key) if isinstance(key, str) else None
        if match is None:
            raise Refusal("the key of a region must be a name of system shared memory, such as /tensors")
        if not (_whole(offset, 0) and _whole(nbytes, 1)):
            raise Refusal("the offset and byte_size of a region must be whole numbers, the byte_size at least 1")
        self._check_free(name)
        try:
            status = os.lstat(os.path.join(SHARED, match[1]))
        except OSError as error:
            raise Refusal(f"there is no shared memory {key!r}: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode) or status.st_size < offset + nbytes:
            raise Refusal(f"the shared memory {key!r} has {status.st_size} bytes, not {offset + nbytes}")
        self._found[name] = Region(match[1], offset, nbytes)

    def register_cuda(self, name: str, handle: Any, device: Any, nbytes: Any) -> None:
        """Register memory of a GPU by its handle as base64. Raises Refusal for an invalid handle.

        The worker opens it when a request first names it: this process has no GPU."""
        self._check_enabled()
        try:
            found = base64.b64decode(handle, validate=True) if isinstance(handle, str) else b""
        except (binascii.Error, ValueError):
            found = b""
        if len(found) != HANDLE_BYTES:
            raise Refusal(
                f"the raw_handle of a region must be the {HANDLE_BYTES} bytes of cudaIpcGetMemHandle as base64"
            )
        if not (_whole(device, 0) and _whole(nbytes, 1)):
            raise Refusal("the device_id and byte_size of a region must be whole numbers, the byte_size at least 1")
        self._check_free(name)
        self._found[name] = DeviceRegion(base64.b64encode(found).decode(), device, nbytes)

    def _check_free(self, name: str) -> None:
        if name in self._found:
            raise Refusal(f"the region {name!r} is registered already")
        if len(self._found) >= MOST:
            raise Refusal(f"{MOST} regions are registered already")

    def unregister(self, name: str) -> None:
        """Forget one region, or all for "". An unknown name is no error, as with Triton."""
        self._forget(Region, name)

    def unregister_cuda(self, name: str) -> set[str]:
        """As :meth:`unregister`, for memory of GPUs. Returns the handles that no region has any more."""
        gone = {r.handle for r in self._forget(DeviceRegion, name)}
        return gone - {r.handle for r in self._found.values() if isinstance(r, DeviceRegion)}

    def _forget(self, kind: type[_Kind], name: str) -> list[_Kind]:
        self._check_enabled()
        rows = {n: r for n, r in self._found.items() if isinstance(r, kind) and name in ("", n)}
        for n in rows:
            del self._found[n]
        return list(rows.values())

    def status(self, name: str = "") -> list[dict[str, Any]]:
        """The registered regions, or one. Raises NotFound."""
        rows = self._rows(Region, name)
        return [{"name": n, "key": f"/{r.key}", "offset": r.offset, "byte_size": r.nbytes} for n, r in rows]

    def cuda_status(self, name: str = "") -> list[dict[str, Any]]:
        """As :meth:`status`, of memory of GPUs."""
        return [{"name": n, "device_id": r.device, "byte_size": r.nbytes} for n, r in self._rows(DeviceRegion, name)]

    def _rows(self, kind: type[_Kind], name: str) -> list[tuple[str, _Kind]]:
        self._check_enabled()
        rows = [(n, r) for n, r in self._found.items() if isinstance(r, kind) and name in ("", n)]
        if name and not rows:
            raise NotFound(f"the region {name!r} is not registered")
        return rows

    def slice(self, part: NamedPart) -> RegionSlice | DeviceSlice:
        """The bytes of a region that a client names. Raises Refusal."""
        self._check_enabled()
        name, offset, nbytes = part.region, part.offset, part.nbytes
        region = self._found.get(name) if isinstance(name, str) else None
        if region is None:
            raise Refusal(f"the region {name!r:.60} is not registered")
        if not (_whole(offset, 0) and _whole(nbytes, 0)):
            raise Refusal("shared_memory_offset and shared_memory_byte_size must be whole numbers")
        if offset + nbytes > region.nbytes:
            raise Refusal(f"the region {name!r} has {region.nbytes} bytes, not {offset + nbytes}")
        if isinstance(region, DeviceRegion):
            return DeviceSlice(region.handle, offset, nbytes)
        return RegionSlice(region.key, region.offset + offset, nbytes)

    def _check_enabled(self) -> None:
        if not self.enabled:
            raise Refusal("this server takes no shared memory", hint="optdnn serve --shared-memory")


def _whole(value: Any, least: int) -> bool:
    """Whether a client's value is an integer from ``least`` on."""
    return type(value) is int and value >= least


def write(target: RegionSlice, data: memoryview) -> None:
    """Write an output into a region. Raises Refusal where it does not fit."""
    if len(data) > target.nbytes:
        raise Refusal(f"an output has {len(data)} bytes; its region has {target.nbytes}")
    assert isinstance(target.key, str)
    file = open_shared(target.key, os.O_WRONLY)
    try:
        done = 0
        while done < len(data):
            done += os.pwrite(file, data[done:], target.offset + done)
    except OSError as error:
        raise Refusal(f"the shared memory {target.key!r} cannot be written: {error.strerror}") from error
    finally:
        os.close(file)
