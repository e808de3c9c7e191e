"""Operators that a library accepts but must not run; they run elsewhere, and the build reports it.

OpenVINO's plain faults are in :mod:`optdnn.lowering.cpu.openvino_faults`, integers that it cannot hold in
:mod:`optdnn.lowering.cpu.wide_integers`. Besides:

* OpenVINO trusts axes, sizes, pads and positions. A wrong one makes it read or write outside of its memory, and the process
  crashes (seen with CumSum, Pad, Slice, Resize, GatherND, ScatterElements, Tile; Gather of a row of integers returns the adjacent
  memory). Constants are no exception. OpenVINO gets known values, and positions and pads only if they are proven to be in range
  (:mod:`optdnn.ops.indices`). ONNX Runtime checks them and returns an error.
* OpenVINO does not run operators that read a tensor without elements. Their results keep the sizes and the elements of an earlier
  run (seen with Unique), some raise an error (pooling: "Batch size is zero") and some crash (Gather, arithmetic trap). So it gets
  no tensor whose size depends on data: nobody knows how often that size is 0 (2026.4).
* OpenVINO's compiler crashes on a Reshape to a scalar after a product (seen with MatMul, 2026.4); a Squeeze it takes.
* OpenVINO's transposed convolution of signed integers leaves out the zero point of the weights (2026.4).
* OpenVINO gives NaN for a row of an Attention whose boolean mask forbids every position; ONNX asks for zeros.
* ONNX Runtime runs OpenVINO's calls with tensors without elements, on the same model. Operators that then need a guard
  (:mod:`optdnn.lowering.cpu.process_guards`) run on ONNX Runtime alone.
* OpenVINO would run a Loop without a bound forever; for ONNX Runtime the loop gets a bound (:mod:`optdnn.lowering.cpu.loops`).
* OpenVINO's reader of ONNX takes packed 4-bit weights only where the model's file holds them; here they are passed separately.
* ONNX Runtime's RoiAlign without a sampling_ratio samples each pixel of a region, also outside of the image. A region of 3e9 pixels
  takes all memory. Ours visits the samples inside of the image.
* ONNX Runtime ignores MaxUnpool's operand output_shape (its own tests leave out ONNX's case of it).
* Their Fourier transforms (DFT, STFT) are off by up to 1e-3 of a result that should be 0, and some results lack an axis.
* ONNX Runtime's Python binding passes neither bfloat16 arrays nor floats of 8 or integers of 4 and fewer bits. OpenVINO's binding
  passes no floats of 8 and no integers of 4 and fewer bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from optdnn.dim import bounds, dim_min
from optdnn.ir.body import bodies
from optdnn.ir.graph import STRUCTURAL, Graph, Op, Value
from optdnn.ir.inference import known_shape
from optdnn.limits import LOOP_TRIPS
from optdnn.lowering.cpu.eight_bits import saturating
from optdnn.lowering.cpu.empty_sizes import symbol_names
from optdnn.lowering.cpu.loops import endless, too_often
from optdnn.lowering.cpu.openvino_faults import known_faults
from optdnn.lowering.cpu.process_guards import need_guards
from optdnn.lowering.cpu.wide_integers import beyond_32_bits
from optdnn.ops.indices import ALONG_AXIS, TUPLES, all_inside
from optdnn.types import (
    BF16,
    BOOL,
    DTYPES,
    NARROW_FLOATS,
    NARROW_INTEGERS,
    DType,
    TensorType,
    bits_of,
    dtype_name,
    is_float,
    normalize_axis,
)

INDEXED = ALONG_AXIS | TUPLES
PACKED = ("PackedGather", "PackedMatMul")
_NARROW = frozenset({*NARROW_FLOATS, *NARROW_INTEGERS})
_REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")
_BY_SLOTS: dict[tuple[int, ...], str] = {
    (0,): "ConstantOfShape",
    (1,): "CumProd CumSum Expand OneHot Reshape ReverseSequence Split Squeeze Tile TopK Trilu Unsqueeze",
    (2,): "NonMaxSuppression RoiAlign",
    (4,): "GRU LSTM RNN",
    (0, 1, 2): "Range",
    (1, 2): "Col2Im",
    (1, 3): "Pad",
    (1, 2, 3): "Resize",
    (1, 2, 3, 4): "Slice",
}
PARAMETERS: dict[str, tuple[int, ...]] = {
    **{f"Reduce{r}": (1,) for r in _REDUCTIONS},
    **{kind: slots for slots, kinds in _BY_SLOTS.items() for kind in kinds.split()},
}
"""Operand slots that hold positions or counts, by kind."""


def openvino_must_not(graph: Graph) -> dict[int, str]:
    """Op id -> reason, for OpenVINO."""
    data = data_dependent(graph)
    out = {**known_faults(graph), **_touching(graph, _NARROW), **_transforms(graph), **saturating(graph)}
    out |= beyond_32_bits(graph, PARAMETERS)
    out |= dict.fromkeys(_without_elements(graph), "openvino may crash on a tensor without elements")
    out |= {
        i: f"the size of {name!r} depends on data; if it is 0, openvino fails, crashes or returns an earlier call's result"
        for i, name in sized_by_data(graph).items()
    }
    out |= {op.id: "openvino does not end a loop that its condition does not end" for op in endless(graph)}
    out |= need_guards(graph)
    out |= _nested(graph)
    reason = "openvino reads packed weights of fewer than 8 bits only from a model file"
    out |= {op.id: reason for op in graph.of_kind(*PACKED) if op.kind == "PackedGather" or not _is_bytes(op)}
    for op in graph.of_kind("Attention"):
        mask = op.input(3)
        if mask is not None and graph.type(mask).dtype == BOOL and graph.constant_value(mask) is None:
            out[op.id] = "openvino gives NaN if a row of the mask forbids everything; it should give zeros"
    for op in graph.of_kind("ConvTranspose"):
        made = [graph.op(v) for v in op.inputs[:2] if v is not None]
        zeros = [graph.constant_value(d.input(2)) for d in made if d.kind == "DequantizeLinear"]
        if len(zeros) == 2 and zeros[1] is not None and zeros[1].any():
            out[op.id] = "openvino leaves out the zero point of its weights"
    for op in graph.of_kind("Reshape"):
        if (
            op.outputs[0].type.shape == ()
            and op.inputs[0] is not None
            and graph.op(op.inputs[0]).kind not in STRUCTURAL
        ):
            out[op.id] = "openvino's compiler may crash if a Reshape makes a scalar of a computed value"
    for op in graph.order():
        if (name := _unchecked(graph, op)) is not None:
            whence = "comes from an input" if name.op in data else "follows from sizes"
            shown = graph.output(name).name
            out[op.id] = f"openvino does not check {shown!r}, which {whence}: a wrong value may crash it"
    return {**out, **_in_bodies(graph, openvino_must_not)}


def _unchecked(graph: Graph, op: Op) -> Value | None:
    """The operand that holds positions or counts and is not proven to be in range, or None."""
    for slot in PARAMETERS.get(op.kind, ()):
        value = op.input(slot)
        if value is not None and graph.known(value) is None:
            return value
    value = op.input(1)
    if value is None:
        return None
    if op.kind in INDEXED and not (op.kind == "Gather" and _gives_zeros(graph, op)):
        types = [None if v is None else graph.type(v) for v in op.inputs]
        return None if all_inside(op.kind, op.attrs, types, graph.known(value)) else value
    if op.kind == "Pad" and not _crops_inside(graph, op):
        return value
    if op.kind == "Tile" and any(bounds(n)[0] < 0 for n in known_shape(graph.known(value)) or ()):
        return value
    return None


def _gives_zeros(graph: Graph, op: Op) -> bool:
    """Whether OpenVINO's Gather gives zeros for positions outside. For rows of integers it does not: it reads at any position."""
    x = op.inputs[0]
    assert x is not None
    shape, dtype = graph.type(x).shape, graph.type(x).dtype
    return is_float(dtype) or (shape is not None and len(shape) > 1)


def _crops_inside(graph: Graph, op: Op) -> bool:
    """Whether negative pads never remove more elements than there are, for any sizes."""
    x, pads = op.inputs[0], known_shape(graph.known(op.input(1)))
    assert x is not None
    dims = graph.type(x).shape
    if all(bounds(n)[0] >= 0 for n in pads or ()):
        return True
    axes = known_shape(graph.known(op.input(3)))
    if dims is None or pads is None:
        return False
    which = range(len(dims)) if axes is None else [normalize_axis(int(a), len(dims)) for a in axes]  # type: ignore[arg-type]
    ends = zip(pads, pads[len(pads) // 2 :], strict=False)
    return all(bounds(dims[a] + dim_min(p, 0) + dim_min(q, 0))[0] >= 0 for a, (p, q) in zip(which, ends, strict=False))


def _in_bodies(graph: Graph, must_not: Callable[[Graph], Mapping[int, str]]) -> dict[int, str]:
    """Each op with a body (of If, Loop or Scan) that contains an op that must not run."""
    out = {}
    for op in graph.order():
        reason = next((r for body in bodies(op) for r in must_not(body.graph).values()), None)
        if reason is not None:
            out[op.id] = f"in its body, {reason}"
    return out


def sized_by_data(graph: Graph) -> dict[int, str]:
    """Each op that reads or writes a tensor whose size depends on data, not only on the sizes of the graph's inputs: op id ->
    the tensor's name. An op whose body contains such a tensor is included."""
    data = data_dependent(graph)
    known = {s for i in graph.inputs for s in symbol_names(graph.op(i).outputs[0].type)}
    from_data: set[str] = set()
    found: dict[int, str] = {}

    def varies(t: TensorType) -> bool:
        """An unknown rank is assumed to depend on data."""
        return t.shape is None or not from_data.isdisjoint(symbol_names(t))

    for op in graph.order():
        if op.kind in ("Input", "Constant"):
            continue
        fresh = {s for o in op.outputs for s in symbol_names(o.type)} - known
        if op.id in data and _sizes_itself(graph, op, data):
            from_data |= fresh
        known |= fresh
        read = [graph.output(v) for v in op.inputs if v is not None]
        for o in (*op.outputs, *read):
            if op.kind != "Output" and varies(o.type):
                found[op.id] = o.name
                break
        for body in bodies(op):
            inside = sized_by_data(body.graph)
            outer = {s for v in read for s in symbol_names(v.type)}
            changing = [
                body.graph.op(i).outputs[0]
                for i in body.graph.inputs
                if not outer.issuperset(symbol_names(body.graph.op(i).outputs[0].type))
            ]
            if inside or changing:
                found.setdefault(op.id, changing[0].name if changing else next(iter(inside.values())))
    return found


def _sizes_itself(graph: Graph, op: Op, data: set[int]) -> bool:
    """Whether data decide new sizes of an op's results: the op counts something, or its size operands are computed."""
    if op.kind not in PARAMETERS or op.kind == "NonMaxSuppression":  # its parameter is only an upper limit
        return True
    slots = (op.input(slot) for slot in PARAMETERS[op.kind])
    return any(v is not None and v.op in data and graph.known(v) is None for v in slots)


def _without_elements(graph: Graph) -> set[int]:
    """Each op that reads or writes a tensor that has no elements, for any sizes of the inputs."""
    found = set()
    for op in graph.order():
        types = [o.type for o in op.outputs] + [graph.type(v) for v in op.inputs if v is not None]
        if op.kind not in STRUCTURAL and any(t.shape is not None and 0 in t.shape for t in types):
            found.add(op.id)
    return found


def onnxruntime_must_not(graph: Graph) -> dict[int, str]:
    """Op id -> reason, for ONNX Runtime."""
    reason = "onnxruntime's MaxUnpool places values as if there were no output_shape"
    unpools = {op.id: reason for op in graph.of_kind("MaxUnpool") if op.input(2) is not None}
    adaptive = "without a sampling_ratio, onnxruntime samples each pixel of a region: a huge one takes all memory, or does not end"
    regions = {op.id: adaptive for op in graph.of_kind("RoiAlign") if op.attrs.sampling_ratio == 0}
    own = {**_touching(graph, _NARROW | {BF16}), **unpools, **regions, **_transforms(graph), **saturating(graph)}
    return {**own, **_nested(graph), **_in_bodies(graph, onnxruntime_must_not)}


def _is_bytes(op: Op) -> bool:
    """Whether the codes of packed weights are bytes, which both libraries accept."""
    return bits_of(DTYPES[op.attrs.code]) == 8


def _transforms(graph: Graph) -> dict[int, str]:
    return {op.id: "the library's Fourier transforms are not precise" for op in graph.of_kind("DFT", "STFT")}


def _nested(graph: Graph) -> dict[int, str]:
    return {op.id: f"its loops could run more than {LOOP_TRIPS.value} times together" for op in too_often(graph)}


def data_dependent(graph: Graph) -> set[int]:
    """Ids of the ops whose results depend on the data (not only on the shapes) of inputs."""
    found = set(graph.inputs)
    for op in graph.order():
        if op.kind in STRUCTURAL or op.definition.traits.shape_only:
            continue
        if any(v is not None and v.op in found for v in op.inputs):
            found.add(op.id)
    return found


def _touching(graph: Graph, dtypes: frozenset[DType]) -> dict[int, str]:
    """Each op that reads or writes one of these types."""
    out = {}
    for op in graph.order():
        types = {o.type.dtype for o in op.outputs} | {graph.type(v).dtype for v in op.inputs if v is not None}
        if op.kind not in STRUCTURAL and types & dtypes:
            out[op.id] = f"the library's binding has no {dtype_name(min(types & dtypes, key=str))} arrays"
    return out
