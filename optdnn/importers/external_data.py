"""Tensors stored next to the model file (ONNX external data), read strictly and memory-mapped.

A model is untrusted input: a tensor's ``location`` may only name a regular file inside the model's own folder. Absolute
paths, ``..``, and links that lead out of the folder are refused, and offset and length must be inside the file.
Source: ONNX, "External Data" (keys location, offset, length; checksum is not verified).
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np

from optdnn.errors import ModelError
from optdnn.types import Array


class ExternalData:
    """Reader of one model's external files; each file is opened and mapped once.

    ``folder`` is the model's folder, or None for a model that did not come from a file; any external tensor is then
    refused. ``model`` names the model in messages.
    """

    def __init__(self, folder: Path | None, model: str):
        self._folder = None if folder is None else os.path.realpath(folder)
        self._model = model
        self._maps: dict[str, Array] = {}

    def read(self, tensor: str, entries: Mapping[str, str], nbytes: int) -> Array:
        """The ``nbytes`` little-endian bytes of ``tensor`` as a read-only uint8 array over the mapped file.

        Raises ModelError naming the tensor and the path if the file is missing, lies outside of the folder or is too short.
        The same if ``length`` is not the number of bytes that the tensor's shape and type need.
        """
        where = f"{self._model}: tensor {tensor!r}"
        location = entries.get("location", "")
        if not location:
            raise ModelError(f"{where} has external data without a location")
        if self._folder is None:
            raise ModelError(
                f"{where} is stored in the external file {location!r}, but the model was not given as a file",
                hint="pass the model's path, or load its external data into the ModelProto first",
            )
        offset = _number(entries, "offset", 0, where)
        length = _number(entries, "length", nbytes, where)
        if length != nbytes:
            raise ModelError(
                f"{where} needs {nbytes} bytes for its shape and type, its external data declares {length}"
            )
        if not nbytes:
            return np.zeros(0, np.uint8)
        data = self._map(location, where)
        if offset + nbytes > data.size:
            raise ModelError(
                f"{where} wants bytes {offset} to {offset + nbytes} of {location!r}, which has {data.size}",
                hint="the external file is truncated or belongs to another model",
            )
        return data[offset : offset + nbytes]

    def _map(self, location: str, where: str) -> Array:
        if location not in self._maps:
            self._maps[location] = _map_file(self._resolve(location, where), location, where)
        return self._maps[location]

    def _resolve(self, location: str, where: str) -> str:
        """The real path of ``location``, checked to be inside of the folder."""
        assert self._folder is not None
        hint = "external data is only read from the model's own folder; copy the file there"
        windows = PureWindowsPath(location)
        if "\0" in location or PurePosixPath(location).is_absolute() or windows.drive or windows.root:
            raise ModelError(f"{where}: external data location {location!r} is not a relative path", hint=hint)
        if ".." in PurePosixPath(location).parts or ".." in windows.parts:
            raise ModelError(f"{where}: external data location {location!r} leads out of the model's folder", hint=hint)
        path = os.path.join(self._folder, location)
        real = os.path.realpath(path)
        if os.path.commonpath([real, self._folder]) != self._folder:
            raise ModelError(f"{where}: external data file {path} is a link out of the model's folder", hint=hint)
        return real


def _map_file(real: str, location: str, where: str) -> Array:
    """The whole file as a read-only uint8 array. The path contains no more links, so none is followed here."""
    try:
        descriptor = os.open(real, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError as error:
        raise ModelError(
            f"{where}: external data file {real} cannot be read: {error.strerror}",
            hint=f"put {location!r} into the model's folder",
        ) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(f"{where}: external data file {real} is not a regular file")
        if not status.st_size:
            return np.zeros(0, np.uint8)
        return np.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError, MemoryError) as error:
        raise ModelError(f"{where}: external data file {real} cannot be mapped: {error}") from error
    finally:
        os.close(descriptor)


def _number(entries: Mapping[str, str], key: str, default: int, where: str) -> int:
    text = entries.get(key)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ModelError(f"{where}: external data {key} {text!r} is not a non-negative integer")
    return int(text)
