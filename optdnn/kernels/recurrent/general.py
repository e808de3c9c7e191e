"""The tactic that runs any recurrent layer: a product of all inputs, then one generated kernel over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from optdnn.ir.graph import Op
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.gemm.matmul import emit_matmul
from optdnn.kernels.launch import Parameters
from optdnn.kernels.pointwise.expressions import CPP, arithmetic
from optdnn.kernels.recurrent.activations import activation, per_direction
from optdnn.kernels.recurrent.hopper import initial_states
from optdnn.kernels.tactic import Tactic
from optdnn.ops.base import Attrs, Stage, attrs_dict
from optdnn.ops.fused import plain_stages
from optdnn.ops.rnn import GATES, RNNAttrs
from optdnn.types import FP32, FP64

THREADS = 512


class GeneralRNN(Tactic):
    """RNN, GRU and LSTM with all options of ONNX: a product of all inputs, then a block per entry of the batch."""

    name = "rnn"

    def refuse(self, b: Builder, op: Op) -> str | None:
        hidden, wide = op.attrs.hidden_size, op.outputs[0].type.dtype == FP64
        if 4 * hidden * (8 if wide else 4) > 99 << 10:
            return f"{hidden} hidden units do not fit the shared memory of a block"
        return None if op.outputs[0].type.static_shape[0] else "it has no steps"

    def emit(self, b: Builder, op: Op, config: Any) -> None:
        steps, count, batch, hidden = op.outputs[0].type.static_shape
        gates = GATES[op.kind]
        x, w, r = (b.operand(v) for v in op.inputs[:3])
        wide = FP64 if x.dtype == FP64 else FP32
        results = [b.target(v) for v in op.values]
        bias = None if op.input(3) is None else b.operand(op.inputs[3])
        for d in range(count):
            projected = b.new(f"{op.outputs[0].name}.gates{d}", wide, (steps, batch, gates * hidden))
            right = w.view((w.shape[2], w.shape[1]), (w.strides[2], w.strides[1]), d * w.strides[0])
            stages, extra = [], {}
            if bias is not None:
                extra[2] = bias.view((gates * hidden,), (bias.strides[1],), d * bias.strides[0])
                stages = [Stage("Add", (-1, 2), Attrs())]
            attrs = {"prologue": (), "epilogue": plain_stages(stages), "arity": 2}
            emit_matmul(
                b, op, x, right, projected, stages, extra, 1.0, {}, "MatMul", attrs, [x, right, *extra.values()]
            )
            more = None
            if bias is not None:
                more = bias.view(
                    (gates * hidden,), (bias.strides[1],), d * bias.strides[0] + gates * hidden * bias.strides[1]
                )
            self._recur(b, op, d, projected, _direction(r, d), more, results)

    @staticmethod
    def _recur(
        b: Builder,
        op: Op,
        d: int,
        projected: TensorView,
        r: TensorView,
        bias: TensorView | None,
        results: Sequence[TensorView],
    ) -> None:
        a: RNNAttrs = op.attrs
        steps, _, batch, hidden = op.outputs[0].type.static_shape
        t, dtype = arithmetic(projected.dtype), op.outputs[0].type.dtype
        lens = None if op.input(4) is None else b.operand(op.inputs[4])
        states = [None if v is None else _direction(b.operand(v), d) for v in initial_states(op)]
        peep = op.input(7) if op.kind == "LSTM" else None
        p = None if peep is None else _direction(b.operand(peep), d)
        writes = [y.view((steps, batch, hidden), (y.strides[0], *y.strides[2:]), d * y.strides[1]) for y in results[:1]]
        writes += [_direction(y, d) for y in results[1:]]
        named: list[tuple[str, TensorView | None]] = [
            ("g", projected), ("r", r), ("b", bias), ("q", p), ("lens", lens), ("h0", states[0]),
            ("c0", states[1] if len(states) > 1 else None), *zip(("y", "yh", "yc"), writes, strict=False),
        ]  # fmt: skip
        present = [(n, x) for n, x in named if x is not None]
        fields = [
            f"{'' if n[0] == 'y' else 'const '}{CPP[x.dtype]}* {n}; i64 s{n}[{max(len(x.shape), 1)}];"
            for n, x in present
        ]
        each = per_direction(op)
        text = _Recurrence(op, d, t, CPP[dtype], frozenset(n for n, _ in present)).text(fields)
        parameters = Parameters()
        for name, x in present:
            parameters.pointer(name).i64(*x.strides)
        reverse = a.direction == "reverse" or d == 1
        own = attrs_dict(a) | {
            "cell": op.kind, "direction": "reverse" if reverse else "forward",
            "activations": a.activations[d * each : (d + 1) * each], "alphas": a.alphas[d * each : (d + 1) * each],
            "betas": a.betas[d * each : (d + 1) * each],
        }  # fmt: skip
        shared = 4 * hidden * projected.dtype.itemsize
        launch = parameters.generated(b.arch, text, "recurrence", batch, THREADS, shared=shared)
        reads = [x for n, x in named if n[0] != "y"]
        b.emit(op, launch, dict(present), "Recurrence", own, reads, writes)


def _direction(x: TensorView, d: int) -> TensorView:
    """Direction ``d`` of a tensor with the directions as its first axis."""
    return x.view(x.shape[1:], x.strides[1:], d * x.strides[0])


@dataclass(frozen=True)
class _Recurrence:
    """The generated kernel of direction ``d`` of a layer. A warp computes a hidden unit; its lanes share the units of the previous state.

    ``t``: type of the arithmetic. ``stored``: type of the results. ``names``: the parameters that are present.
    """

    op: Op
    d: int
    t: str
    stored: str
    names: frozenset[str]

    @property
    def hidden(self) -> int:
        """Hidden units."""
        return int(self.op.attrs.hidden_size)

    def activation(self, index: int, x: str, gate: bool = True) -> str:
        """C++ of the direction's activation function number ``index``."""
        return activation(self.op.attrs, self.d * per_direction(self.op) + index, gate, x, self.t, {})

    def _bias(self, gate: int) -> str:
        return f"widen(p.b[({gate} * {self.hidden} + u) * p.sb[0]])" if "b" in self.names else ""

    def before(self, gate: int) -> str:
        """C++ of a gate before its activation."""
        bias = self._bias(gate)
        return f"p.g[at + {gate} * {self.hidden} + u] + a{gate}{f' + {bias}' if bias else ''}"

    def dot(self, first: int, last: int, source: str) -> str:
        """C++ of the products of a state with the weights of the gates from ``first`` up to, not including, ``last``."""
        own, t = range(first, last), self.t
        zero = " ".join(f"{t} a{g} = 0;" for g in own)
        add = " ".join(f"a{g} += {t}(widen(p.r[({g} * {self.hidden} + u) * p.sr[0] + k * p.sr[1]])) * x;" for g in own)
        fold = " ".join(f"a{g} += __shfl_xor_sync(0xffffffffu, a{g}, m);" for g in own)
        return (f"{zero} for (int k = lane; k < {self.hidden}; k += 32) {{ const {t} x = {source}[k]; {add} }} "
                f"for (int m = 16; m; m /= 2) {{ {fold} }}")  # fmt: skip

    def peephole(self, gate: int, cell: str) -> str:
        """C++ that adds a gate's peephole of the cell."""
        return f" + {self.t}(widen(p.q[({gate} * {self.hidden} + u) * p.sq[0]])) * {cell}" if "q" in self.names else ""

    def lstm(self) -> str:
        """C++ of a unit's step of an LSTM."""
        t, f, before, peep = self.t, self.activation, self.before, self.peephole
        forget = f"{t}(1) - i" if self.op.attrs.input_forget else f(0, before(2) + peep(2, "old"))
        return (f"{self.dot(0, 4, 'h')} if (lane == 0) {{ const {t} old = c[u], i = {f(0, before(0) + peep(0, 'old'))}; "
                f"const {t} cell = ({forget}) * old + i * {f(1, before(3))}; c[u] = cell; "
                f"next[u] = {f(0, before(1) + peep(1, 'cell'))} * {f(2, 'cell', False)}; }}")  # fmt: skip

    def gru(self) -> tuple[str, str]:
        """C++ of a GRU: the code that gates the state first ("" if the reset gate comes after the product), and a unit's step."""
        t, f, before = self.t, self.activation, self.before
        if self.op.attrs.linear_before_reset:
            bias = f" + {t}({self._bias(2)})" if "b" in self.names else ""
            return "", (
                f"{self.dot(0, 3, 'h')} if (lane == 0) {{ const {t} z = {f(0, before(0))}, reset = {f(0, before(1))}; "
                f"const {t} made = {f(1, f'p.g[at + 2 * {self.hidden} + u] + reset * (a2{bias})')}; "
                f"next[u] = ({t}(1) - z) * made + z * h[u]; }}")  # fmt: skip
        first = (f"for (int u = warp; u < {self.hidden}; u += {THREADS // 32}) {{ {self.dot(1, 2, 'h')} "
                 f"if (lane == 0) gated[u] = {f(0, before(1))} * h[u]; }} __syncthreads();")  # fmt: skip
        return first, (
            f"{self.dot(0, 1, 'h')} {self.dot(2, 3, 'gated')} if (lane == 0) {{ const {t} z = {f(0, before(0))}; "
            f"next[u] = ({t}(1) - z) * {f(1, before(2))} + z * h[u]; }}")  # fmt: skip

    def step(self) -> tuple[str, str]:
        """C++ that runs for all units before a step, and C++ of a unit's step."""
        if self.op.kind == "LSTM":
            return "", self.lstm()
        if self.op.kind == "GRU":
            return self.gru()
        return "", f"{self.dot(0, 1, 'h')} if (lane == 0) next[u] = {self.activation(0, self.before(0))};"

    def start(self, state: str) -> str:
        """C++ of a unit's initial state."""
        if state not in self.names:
            return f"{self.t}(0)"
        return f"{self.t}(widen(p.{state}[n * p.s{state}[0] + u * p.s{state}[1]]))"

    def text(self, fields: Sequence[str]) -> str:
        """The kernel's text. ``fields``: the fields of its parameters."""
        steps, _, batch, hidden = self.op.outputs[0].type.static_shape
        t, ty, width = self.t, self.stored, GATES[self.op.kind] * hidden
        first, step = self.step()
        reverse = self.op.attrs.direction == "reverse" or self.d == 1
        length = f"min(max(int(p.lens[n * p.slens[0]]), 0), {steps})" if "lens" in self.names else str(steps)
        store = "p.y[t * p.sy[0] + n * p.sy[1] + u * p.sy[2]]"
        end = " ".join(
            f"p.{n}[n * p.s{n}[0] + u * p.s{n}[1]] = narrow<{ty}>({v}[u]);"
            for n, v in (("yh", "h"), ("yc", "c"))
            if n in self.names
        )
        return f"""struct Params {{ {" ".join(fields)} }};

extern "C" __global__ void __launch_bounds__({THREADS}) recurrence(const __grid_constant__ Params p) {{
    extern __shared__ __align__(16) unsigned char memory[];
    {t}* h = reinterpret_cast<{t}*>(memory);
    {t}* next = h + {hidden};
    {t}* c = next + {hidden};
    {t}* gated = c + {hidden};
    launch_dependents();
    wait_for_predecessor();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const i64 n = blockIdx.x;
    const int length = {length};
    for (int u = threadIdx.x; u < {hidden}; u += {THREADS}) {{
        h[u] = {self.start("h0")};
        c[u] = {self.start("c0")};
        for (i64 t = length; t < {steps}; t++) {store} = narrow<{ty}>({t}(0));
    }}
    __syncthreads();
    for (int s = 0; s < length; s++) {{
        const i64 t = {"length - 1 - s" if reverse else "s"}, at = (t * {batch} + n) * {width};
        {first}
        for (int u = warp; u < {hidden}; u += {THREADS // 32}) {{ {step}
            if (lane == 0) {store} = narrow<{ty}>(next[u]);
        }}
        __syncthreads();
        {t}* const last = h;
        h = next;
        next = last;
    }}
    for (int u = threadIdx.x; u < {hidden}; u += {THREADS}) {{ {end} }}
}}
"""
