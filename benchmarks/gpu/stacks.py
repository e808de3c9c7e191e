"""Products of two computed stacks of matrices: our kernel beside cuBLASLt's, each as a network of one MatMul, tuned.

    python benchmarks/gpu/stacks.py --out DIR

GPU microseconds: the median of replays of the network's CUDA graph, ten in a row. Results are compared with NumPy's in fp32.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from tune import measured

import optdnn

SHAPES: dict[str, tuple[tuple[int, ...], int, int, int, bool]] = {
    "scores, 12 heads of 128": ((1, 12), 128, 64, 128, True),
    "scores, 32 x 12 heads of 197": ((32, 12), 197, 64, 200, True),
    "values, 32 x 12 heads of 197": ((32, 12), 197, 200, 64, False),
    "scores, 8 heads of 2048": ((8,), 2048, 64, 2048, True),
    "values, 8 heads of 2048": ((8,), 2048, 2048, 64, False),
    "one large product": ((), 4096, 4096, 4096, False),
    "16 products": ((16,), 512, 512, 512, False),
    "Gram matrix of 64 features": ((), 64, 65536, 64, True),
    "Gram matrices of 128 features": ((4,), 128, 16384, 128, True),
    "linear attention, 12 heads": ((12,), 64, 4096, 64, False),
    "100 small products": ((100,), 49, 64, 49 + 7, True),
}


def model_of(stack: tuple[int, ...], m: int, k: int, n: int, turned: bool) -> onnx.ModelProto:
    """``x`` times ``y`` (``turned``: times its transpose), fp16."""
    half = TensorProto.FLOAT16
    right = (*stack, n, k) if turned else (*stack, k, n)
    axes = list(range(len(stack)))
    nodes = [helper.make_node("Transpose", ["y"], ["t"], perm=[*axes, len(axes) + 1, len(axes)])] if turned else []
    nodes.append(helper.make_node("MatMul", ["x", "t" if turned else "y"], ["z"]))
    values = [helper.make_tensor_value_info(name, half, shape) for name, shape in (("x", (*stack, m, k)), ("y", right))]
    out = helper.make_tensor_value_info("z", half, (*stack, m, n))
    graph = helper.make_graph(nodes, "stack", values, [out])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=2.5)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, (stack, m, k, n, turned) in SHAPES.items():
        model, rng = model_of(stack, m, k, n, turned), np.random.default_rng(0)
        right = (*stack, n, k) if turned else (*stack, k, n)
        feeds = {key: rng.standard_normal(s).astype(np.float16) for key, s in (("x", (*stack, m, k)), ("y", right))}
        wide = feeds["y"].astype(np.float32)
        want = feeds["x"].astype(np.float32) @ (wide.swapaxes(-1, -2) if turned else wide)
        row: dict[str, Any] = {"name": name, "shape": [list(stack), m, k, n, turned]}
        for tactics in ("own", "cublaslt"):
            try:
                engine = optdnn.build(
                    model, target="cuda:sm_90a", precision="fp16", tactics=tactics, budget=options.budget
                )
                found = measured(engine, feeds)
            except Exception as error:
                row[tactics] = {"failed": f"{type(error).__name__}: {error}"[:300]}
                continue
            error = float(np.abs(found["result"]["z"].astype(np.float32) - want).max() / np.abs(want).max())
            used = [s.params.get("tactic", "") for s in engine.program.steps]
            row[tactics] = {"us": round(found["ten_ms"] * 1e3, 2), "error": error, "steps": used}
        rows.append(row)
        print(json.dumps(row), flush=True)
        (options.out / "stacks.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
