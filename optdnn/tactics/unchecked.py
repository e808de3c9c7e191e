"""Operators that a library must not run because it trusts operands that come from the user.

ONNX Runtime checks axes, sizes, pads and positions at run time and returns an error. OpenVINO does not: a wrong one makes it
read or write outside of its memory, and the process is gone (seen with CumSum, Pad, Slice and Resize). When such an operand
depends on an input's data, and not merely on shapes or constants, the operator runs elsewhere.
"""

from __future__ import annotations

from optdnn.ir.graph import Graph

_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
PARAMETERS: dict[str, tuple[int, ...]] = {
    **{f"Reduce{r}": (1,) for r in _REDUCTIONS},
    "ConstantOfShape": (0,),
    "CumProd": (1,),
    "CumSum": (1,),
    "Expand": (1,),
    "GatherElements": (1,),
    "GatherND": (1,),
    "OneHot": (1,),
    "Pad": (1, 3),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Resize": (1, 2, 3),
    "ScatterElements": (1,),
    "ScatterND": (1,),
    "Slice": (1, 2, 3, 4),
    "Split": (1,),
    "Squeeze": (1,),
    "Tile": (1,),
    "Trilu": (1,),
    "Unsqueeze": (1,),
}
"""Operand slots that say where or how much, by kind."""


def data_dependent(graph: Graph) -> set[int]:
    """Ids of the ops whose results depend on the data (not only on the shapes) of inputs."""
    found = set(graph.inputs)
    for op in graph.order():
        if op.kind in ("Input", "Output", "Constant") or op.definition.traits.shape_only:
            continue
        if any(v is not None and v.op in found for v in op.inputs):
            found.add(op.id)
    return found


def trusting_ops(graph: Graph) -> dict[int, str]:
    """Each op with a parameter operand that depends on data, with the reason why an unchecking library must not run it."""
    data = data_dependent(graph)
    out: dict[int, str] = {}
    for op in graph.order():
        for slot in PARAMETERS.get(op.kind, ()):
            value = op.input(slot)
            if value is not None and value.op in data and graph.known(value) is None:
                name = graph.output(value).name
                out[op.id] = f"it does not check {name!r}, which comes from an input, and a wrong value would crash it"
                break
    return out
