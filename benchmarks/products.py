"""Chains of products with packed weights (MatMulNBits), or with 16-bit ones: the cost of a token in a language model.

A workload is ``products/chain:ROWS:bits=4:depth=4096:columns=4096``: products from ``depth`` to ``columns`` features and back
again. ``turns`` is their number (0: so many that their weights exceed L2); each has its own weights. ``bits`` 16 means MatMul.
``block`` is the block size (128); 0 means a scale per column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.rows import Row
from benchmarks.workloads import Workload

BANDWIDTH = 4.3e12
"""Bytes per second that reads of an H200's memory reach."""
CACHE = 128 << 20
"""Bytes of weights: so many that L2 keeps few of them from run to run."""


@dataclass(frozen=True)
class Chain:
    """The products of a workload."""

    rows: int
    bits: int
    depth: int
    columns: int
    block: int = 128
    turns: int = 0

    @classmethod
    def of(cls, workload: Workload) -> Chain:
        """The chain of a workload of this source."""
        return cls(workload.batch, **dict(workload.settings))

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(depth, columns) of each product."""
        each = self.depth * self.columns * min(self.bits, 8) // 8
        turns = self.turns or max(2, -(-CACHE // (2 * each)))
        return [(self.depth, self.columns), (self.columns, self.depth)] * turns

    @cached_property
    def numbers(self) -> np.ndarray:
        """Random bytes of one product; the other products change them."""
        return np.random.default_rng(0).integers(0, 256, self.depth * self.columns, np.uint8)

    def weights(self) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """The weights of each product: packed numbers ``[columns, blocks, bytes]`` with scales ``[columns, blocks]``, or fp32
        ``[depth, columns]`` with None."""
        for k, (depth, columns) in enumerate(self.shapes):
            changed = self.numbers ^ np.uint8(2 * k + 1)
            block = self.block or depth
            if self.bits == 16:
                yield (changed.reshape(depth, columns).astype(np.float32) - 128) / np.float32(74 * depth**0.5), None
                continue
            stored = changed[: depth * columns * self.bits // 8].reshape(
                columns, depth // block, block * self.bits // 8
            )
            spread = 0.29 * (1 << self.bits) * depth**0.5
            rng = np.random.default_rng(k)
            scales = rng.uniform(0.9 / spread, 1.1 / spread, (columns, depth // block))
            # of either sign: the mean of 4-bit numbers is half a step from the zero point, which a chain of one sign multiplies
            yield stored, (scales * rng.choice((-1, 1), scales.shape)).astype(np.float32)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights and scales, which a run reads once."""
        block = self.block or self.depth
        scales = 0 if self.bits == 16 else 2 / block
        return int(sum(k * n * (self.bits / 8 + scales) for k, n in self.shapes))


def model(workload: Workload) -> onnx.ModelProto:
    """The chain as an ONNX model."""
    chain = Chain.of(workload)
    nodes, tensors, name = [], [], "x"
    for k, ((depth, columns), (stored, scales)) in enumerate(zip(chain.shapes, chain.weights(), strict=True)):
        given = {f"w{k}": stored} | ({} if scales is None else {f"s{k}": scales})
        tensors += [numpy_helper.from_array(a, n) for n, a in given.items()]
        inputs, name = [name, *given], f"y{k}"
        if scales is None:
            nodes.append(helper.make_node("MatMul", inputs, [name], name=f"product{k}"))
        else:
            attributes = {"K": depth, "N": columns, "bits": chain.bits, "block_size": chain.block or depth}
            nodes.append(
                helper.make_node("MatMulNBits", inputs, [name], f"product{k}", domain="com.microsoft", **attributes)
            )
    ends = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, (chain.rows, features))
        for n, features in (("x", chain.depth), (name, chain.shapes[-1][1]))
    ]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], tensors)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def truth(workload: Workload, x: Any) -> list[Any]:
    """The chain's result in fp32, by PyTorch on the GPU that ``x`` lies on."""
    import torch

    chain = Chain.of(workload)
    for (depth, _), (stored, scales) in zip(chain.shapes, chain.weights(), strict=True):
        given = torch.from_numpy(stored).to(x.device)
        if scales is None:
            x = x @ given
            continue
        parts = [given >> up & (1 << chain.bits) - 1 for up in range(0, 8, chain.bits)]
        numbers = torch.stack(parts, -1).reshape(len(stored), -1, chain.block or depth).float() - (1 << chain.bits - 1)
        dense = (numbers * torch.from_numpy(scales).to(x.device)[..., None]).reshape(len(stored), depth)
        x = x @ dense.T
    return [x]


def of_bandwidth(workload: Workload, times: Mapping[str, Row]) -> dict[str, float]:
    """For each candidate, the time for reading the weights, over its own time."""
    nbytes = Chain.of(workload).nbytes
    return {name: round(nbytes / BANDWIDTH / (t["ms"] * 1e-3), 4) for name, t in times.items()}
