"""References for checks over real networks: networks with filled weights, results of ONNX Runtime, and a measure of error.

FOLDER below holds ``fill.py`` and ``graphs/NAME.onnx`` with ``NAME.json`` (networks without weights).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from support.scripts import module_of

BOX, SCORE = 1e-3, 1e-3
"""At fp32, two boxes are equal if their corners (as a share of the image) and scores differ by no more than this."""


def fill_module(folder: Path) -> Any:
    """``fill.py`` of a folder: ``fill(path)`` gives the model, ``feeds(model, seed, sizes)`` its inputs."""
    return module_of(folder / "fill.py")


def onnxruntime_results(model: Any, feeds: dict[str, Any]) -> list[Any]:
    """The model's outputs by ONNX Runtime on the CPU, with one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[Any] = session.run(None, feeds)
    return found


def error_of(got: Any, want: Any) -> float:
    """The largest error, relative to the largest magnitude; inf if shapes or integers differ."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return float("inf")
    if want.dtype.kind in "iub":
        return 0.0 if np.array_equal(got, want) else float("inf")
    scale = float(np.abs(want).max(initial=0.0)) or 1.0
    return float(np.abs(got.astype(np.float64) - want).max(initial=0.0) / scale)


def same_boxes(
    got: Sequence[Any], want: Sequence[Any], *, box: float = BOX, score: float = SCORE
) -> dict[str, Any] | None:
    """The boxes of a detector that both results contain. Outputs: boxes [n, 4], scores [n], labels [n] if there are any.

    Each box is paired with one other of its label, score and corners. ``same``: the number of pairs. ``of``: the larger number
    of boxes. ``errors``: for each output, the error over the pairs. None if no output holds boxes.
    """
    k = next((k for k, a in enumerate(want) if a.ndim == 2 and a.shape[1] == 4), None)
    scores = next((k for k, a in enumerate(want) if a.ndim == 1 and a.dtype.kind == "f"), None)
    labels = next((k for k, a in enumerate(want) if a.ndim == 1 and a.dtype.kind in "iu"), None)
    if k is None or scores is None:
        return None
    free, ours, theirs = np.ones(len(want[k]), bool), [], []
    for n, corners in enumerate(got[k]):
        near = free & (np.abs(want[k] - corners).max(axis=1) <= box * np.abs(want[k]).max(initial=0.0))
        near &= np.abs(want[scores] - got[scores][n]) <= score
        if labels is not None:
            near &= want[labels] == got[labels][n]
        for m in np.flatnonzero(near)[:1]:
            free[m] = False
            ours.append(n)
            theirs.append(int(m))
    errors = [error_of(a[ours], b[theirs]) for a, b in zip(got, want, strict=True) if len(b) == len(want[k])]
    return {"same": len(ours), "of": max(len(got[k]), len(want[k])), "errors": errors}
