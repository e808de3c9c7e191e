"""Makes a failing network small: fewer outputs, nodes and runs, as long as it fails in the same way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import onnx
from onnx import helper

from random_nets.draw import Array, Network, needed_nodes, reads_of
from random_nets.oracle import session

Fails = Callable[[Network], bool]
"""Whether a network still fails in the same way. It may get an invalid network, which does not."""


def shrunk(net: Network, fails: Fails, tries: int = 250) -> Network:
    """A smaller network that still fails, after at most ``tries`` trials."""
    left = tries

    def still(candidate: Network) -> bool:
        nonlocal left
        left -= 1
        return left >= 0 and fails(candidate)

    for _ in range(3):
        before = (len(net.model.graph.node), len(net.model.graph.output), len(net.feeds))
        for step in (_fewer_runs, _one_output, _earlier_output, _later_input, _without_a_node):
            net = _first(net, step, still)
        if (len(net.model.graph.node), len(net.model.graph.output), len(net.feeds)) == before or left <= 0:
            break
    return net


def _first(net: Network, step: Callable[[Network], Iterator[Network]], still: Fails) -> Network:
    """Apply candidates of a step as long as one of them fails."""
    while True:
        for candidate in step(net):
            if still(candidate):
                net = candidate
                break
        else:
            return net
        if step in (_earlier_output, _one_output):
            return net  # the first one that fails is the smallest


def _fewer_runs(net: Network) -> Iterator[Network]:
    if len(net.feeds) > 1 and not net.sizes:
        for f in net.feeds:
            yield replace(net, feeds=(f,))
        for k in range(len(net.feeds)):
            yield replace(net, feeds=net.feeds[:k] + net.feeds[k + 1 :])


def _one_output(net: Network) -> Iterator[Network]:
    outputs = list(net.model.graph.output)
    if len(outputs) > 1:
        yield from (_with(net, outputs=[o]) for o in outputs)


def _earlier_output(net: Network) -> Iterator[Network]:
    """An intermediate value as the only output, beginning with the first ones."""
    types = _types(net.model)
    names = [n for node in net.model.graph.node for n in node.output if n in types]
    last = {o.name for o in net.model.graph.output}
    for n in names:
        if n not in last or len(last) > 1:
            yield _with(net, outputs=[types[n]])


def _later_input(net: Network) -> Iterator[Network]:
    """An intermediate value as an input with ONNX Runtime's result for it, beginning with the last ones."""
    if net.sizes:
        return
    types = _types(net.model)
    outputs = {o.name for o in net.model.graph.output}
    names = [n for node in net.model.graph.node[::-1] for n in node.output if n in types and n not in outputs]
    values = _computed(net, names)
    if values is None:
        return
    for n in names:
        if all(v[n].shape == values[0][n].shape for v in values):
            info = helper.make_tensor_value_info(n, types[n].type.tensor_type.elem_type, values[0][n].shape)
            feeds = tuple({**f, n: v[n]} for f, v in zip(net.feeds, values, strict=True))
            yield _with(replace(net, feeds=feeds), inputs=[*net.model.graph.input, info], without={n})


def _without_a_node(net: Network) -> Iterator[Network]:
    """The network without one node, if one of the node's operands has the type of its result."""
    types = _types(net.model)
    types.update({i.name: i for i in net.model.graph.input})
    for k, node in enumerate(net.model.graph.node):
        for source in node.input:
            if source in types and node.output[0] in types and types[source].type == types[node.output[0]].type:
                model = copy.deepcopy(net.model)
                identity = helper.make_node("Identity", [source], [node.output[0]], name=f"was_{node.name}")
                if node.op_type != "Identity":
                    model.graph.node[k].CopyFrom(identity)
                    yield _with(replace(net, model=model))
                elif not any(o.name == node.output[0] for o in model.graph.output):
                    del model.graph.node[k]
                    for other in model.graph.node:
                        other.input[:] = [source if n == node.output[0] else n for n in other.input]
                    yield _with(replace(net, model=model))
                break


def _types(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    try:
        inferred = onnx.shape_inference.infer_shapes(model)
    except onnx.shape_inference.InferenceError:
        return {}
    return {v.name: v for v in (*inferred.graph.value_info, *inferred.graph.output) if v.type.HasField("tensor_type")}


def _computed(net: Network, names: Sequence[str]) -> list[dict[str, Array]] | None:
    model = copy.deepcopy(net.model)
    del model.graph.output[:]
    model.graph.output.extend(onnx.ValueInfoProto(name=n) for n in names)
    try:
        ready = session(model)
        return [dict(zip(names, ready.run(None, dict(f)), strict=True)) for f in net.feeds]
    except Exception:  # ONNX Runtime's exceptions have no common base; without values there is nothing to try
        return None


def _with(
    net: Network, *, outputs: Sequence[onnx.ValueInfoProto] = (), inputs: Sequence[onnx.ValueInfoProto] = (),
    without: set[str] | None = None,
) -> Network:  # fmt: skip
    """The network with these outputs and inputs, and only the necessary nodes. ``without``: values whose nodes are removed."""
    model = copy.deepcopy(net.model)
    g = model.graph
    if outputs:
        kept = [copy.deepcopy(o) for o in outputs]
        del g.output[:]
        g.output.extend(kept)
    nodes = [n for n in g.node if not (without and without & set(n.output))]
    nodes = [copy.deepcopy(n) for n in needed_nodes(nodes, {o.name for o in g.output})]
    used = {name for node in nodes for name in reads_of(node)} | {o.name for o in g.output}
    given = [copy.deepcopy(i) for i in (inputs or g.input) if i.name in used]
    constants = [copy.deepcopy(t) for t in g.initializer if t.name in used]
    del g.node[:], g.input[:], g.initializer[:]
    g.node.extend(nodes)
    g.input.extend(given)
    g.initializer.extend(constants)
    feeds = tuple({i.name: f[i.name] for i in given} for f in net.feeds)
    return replace(net, model=model, feeds=feeds)
