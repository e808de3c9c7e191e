"""Example inputs for any model: pictures, token ids or sequences, as the graph uses them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
from onnx import helper

from optdnn.types import Array

SIZES = {"batch": 2, "length": 16}
"""Sizes of symbolic dimensions that ``sizes`` does not give: the first for axis 0, the second for all other axes."""


def example_inputs(model: onnx.ModelProto, seed: int = 0, sizes: Mapping[str, int] | None = None) -> dict[str, Array]:
    """One value for each input of ``model`` that is not an initializer, in the graph's order; equal arguments, equal
    values.

    Float inputs of rank 4 are smooth random pictures (:func:`pictures`), of rank 3 slowly varying sequences, else
    normal. Integer inputs that index a table (Gather on an initializer) lie within it; those called ``…mask`` are
    ones with some zeros at the ends of the rows; others lie in 0 … 9. ``sizes`` gives symbolic dimensions their
    extents, by name.
    """
    rng = np.random.default_rng([seed, 0x1A9E])
    tables = {t.name: t.dims[0] for t in model.graph.initializer if t.dims}
    rows = {n.input[1]: tables[n.input[0]] for n in model.graph.node if n.op_type == "Gather" and n.input[0] in tables}
    feeds = {}
    for value in model.graph.input:
        if value.name in {t.name for t in model.graph.initializer}:
            continue
        tensor = value.type.tensor_type
        shape = tuple(
            d.dim_value
            if d.HasField("dim_value")
            else (sizes or {}).get(d.dim_param, SIZES["length" if axis else "batch"])
            for axis, d in enumerate(tensor.shape.dim)
        )
        dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        feeds[value.name] = _example(rng, value.name, shape, dtype, rows.get(value.name, 10))
    return feeds


def _example(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], dtype: np.dtype[np.generic], high: int
) -> Array:
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        return (_mask(rng, shape) if name.endswith("mask") else rng.integers(0, high, shape)).astype(dtype)
    if len(shape) == 4:
        return pictures(rng, shape).astype(dtype)
    return (_sequences(rng, shape) if len(shape) == 3 else rng.standard_normal(shape)).astype(dtype)


def pictures(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Random pictures (batch, channels, height, width), float32, of about zero mean and unit variance over many of
    them.

    Mosaics of coarser and coarser tiles are laid over one another, the coarser the stronger, down to one tile for the
    whole picture (its brightness): as in photographs there are edges and texture at every scale, so that a picture at
    half the size has the same local statistics. Channels are correlated. (White noise would not do: averaged over a
    map, all of it looks alike.)
    """
    batch, channels, height, width = shape
    out = np.zeros(shape)
    total = 0.0
    for octave in range(max(1, min(height, width).bit_length() - 1)):
        tiles, strength = 2**octave, 0.2 if octave == 0 else 0.9 ** (octave - 1)  # a variance
        shared, own = (rng.uniform(-1.0, 1.0, (batch, c, tiles + 1, tiles + 1)) for c in (1, channels))
        mosaic = np.sqrt(3.0 * strength) * (0.8 * shared + 0.6 * own)
        rows, columns = (((np.arange(n) / n + rng.random()) * tiles).astype(int) % (tiles + 1) for n in (height, width))
        out += mosaic[:, :, rows][:, :, :, columns]
        total += strength
    return np.asarray(out / np.sqrt(total), np.float32)


def _sequences(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """(steps, batch, features), unit variance, neighboring steps correlated by 0.8."""
    noise = rng.standard_normal(shape)
    for t in range(1, shape[0]):
        noise[t] = 0.8 * noise[t - 1] + 0.6 * noise[t]
    return noise


def _mask(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Rows of ones, zero beyond a random length of at least half of the row."""
    length = rng.integers((shape[-1] + 1) // 2, shape[-1] + 1, (*shape[:-1], 1))
    return np.asarray(np.arange(shape[-1]) < length)
