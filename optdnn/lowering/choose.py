"""The choice of a tactic and a configuration for each operator: from a table of choices, or by preference and cost model.

A choice belongs to a *signature*: everything about an operator that its speed depends on (kind, attributes, types,
places of operands and results). Operators of one signature share the choice and its measurement.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from optdnn.config import BuildOptions
from optdnn.errors import InternalError, UnsupportedError
from optdnn.ir.digest import SMALL
from optdnn.ir.graph import Graph, Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.libraries.providers import providers_here
from optdnn.kernels.tactic import PROVIDERS, Offer, ProblemTactic, Region, Tactic
from optdnn.lowering.table import TACTICS
from optdnn.runtime.program import Plain
from optdnn.target_name import TargetName
from optdnn.types import dtype_name

DEPTH = 8
"""Most operators on a path from an operator to a neighbor's neighbor in its signature. A region is smaller, but the residual
products of a loop of 1,000 steps are a path as long as the loop."""


class TacticChoice(NamedTuple):
    """The names of a tactic and of its configuration ("": the first, or the tactic has none)."""

    tactic: str
    config: str = ""

    def __str__(self) -> str:
        return f"{self.tactic} {self.config}".rstrip()


@dataclass(frozen=True)
class Selection:
    """The limits of a choice, and choices made before.

    ``providers``: some of :data:`PROVIDERS`. ``workspace``: most bytes of scratch memory (None: unlimited). ``row_invariant``: the
    order of a sum must not depend on the batch size. ``choices`` by signature take precedence over preference and cost model.
    """

    providers: frozenset[str] = frozenset(PROVIDERS)
    workspace: int | None = None
    row_invariant: bool = False
    choices: Mapping[str, TacticChoice] = field(default_factory=dict)

    @classmethod
    def of(cls, options: BuildOptions, choices: Mapping[str, TacticChoice] | None = None) -> Selection:
        """The limits of a build's options.

        The cost model (``tactics="heuristic"``) covers our own kernels only. A library that is requested as well runs each
        operation with the algorithm that it ranks first.
        """
        listed = frozenset(options.tactics.split(",")) - {"heuristic"}
        providers = frozenset(PROVIDERS) if options.tactics == "auto" else listed or frozenset({"own"})
        if not TargetName.parse(options.target).simulated and not providers <= {"own"}:
            providers &= providers_here(sure=options.tactics != "auto")
        return cls(providers, options.workspace, options.row_invariant, {} if choices is None else choices)


@dataclass
class Site:
    """A region with the tactic and the configuration that run it (None: the tactic has none).

    ``key`` is the anchor's signature. ``refused`` lists the tactics that cannot run it, with reasons. ``dropped``: another site's
    region contains its operators.
    """

    region: Region
    key: str
    tactic: Tactic
    offer: Offer | None
    refused: Sequence[Mapping[str, str]]
    dropped: bool = False

    @property
    def op(self) -> Op:
        """The region's anchor."""
        return self.region.anchor


@dataclass(frozen=True)
class Decision:
    """The record of an emitted site.

    ``variant`` names the configuration, or the kernel's form if there was no choice. ``launches`` is the number of launches,
    ``scratch`` their scratch memory in bytes.
    """

    region: Region
    signature: str
    choice: TacticChoice
    variant: str
    launches: int
    scratch: int
    refused: Sequence[Mapping[str, str]]
    seconds: float | None = None
    """The cost model's prediction; None without one."""
    dropped: bool = False
    """Launches of another site compute its operators."""

    @property
    def op(self) -> Op:
        """The region's anchor."""
        return self.region.anchor

    def to_plain(self) -> Plain:
        row: dict[str, Plain] = {"nodes": sorted(self.op.src), "kind": self.op.kind, "tactic": self.choice.tactic}
        row |= {"launches": self.launches, "signature": self.signature}
        if neighbors := sorted(self.region.src - self.op.src):
            row["with"] = neighbors
        if self.variant:
            row["config" if self.choice.config else "variant"] = self.variant
        row |= {"scratch_bytes": self.scratch} if self.scratch else {}
        row |= {"refused": [dict(r) for r in self.refused]} if self.refused else {}
        return row | ({"dropped": True} if self.dropped else {})


# ---------------------------------------------------------------- signatures


def signature(b: Builder, op: Op) -> str:
    """A digest (32 hexadecimal digits) of everything about an operator that its speed depends on, except the machine."""
    text = json.dumps(_facts(b, op, {}), separators=(",", ":"))
    return hashlib.sha256(f"{b.arch} {text}".encode()).hexdigest()[:32]


def _facts(
    b: Builder, op: Op, seen: dict[int, int], among: frozenset[int] = frozenset(), depth: int = DEPTH
) -> list[Plain]:
    """The facts of an operator, as JSON, with the facts of its neighbors, and of their neighbors, up to ``depth``. ``among``: operators
    that count as neighbors as well, because an operator on the way here has them as neighbors. ``seen``: the operators so far, with
    their numbers. Facts that stand there already are a number: paths through the shortcuts of a network are too many to repeat them
    for each."""
    seen[op.id] = len(seen)
    neighbors = among | _neighbors(b.graph, op)
    operands: list[Plain] = []
    for value in op.inputs:
        if value is None:
            operands.append(None)
            continue
        constant = b.graph.constant_value(value)
        if constant is not None:
            small = constant.dtype.kind in "iub" and constant.size <= SMALL
            values = constant.reshape(-1).tolist() if small else None
            operands.append(["constant", dtype_name(constant.dtype), list(constant.shape), values])
            continue
        source = b.graph.op(value)
        inside = bool(among) and value not in b.place  # a result inside the region that computes the neighbor
        place = None if inside else _place(b.operand(value))
        facts: Plain = None
        if source.id in neighbors and depth:
            facts = seen[source.id] if source.id in seen else _facts(b, source, seen, neighbors, depth - 1)
        operands.append([place, facts])
    results: list[Plain] = []
    for port, out in enumerate(op.outputs):
        value = Value(op.id, port)
        reserved = b.reserved.get(value)
        used = bool(b.graph.uses(value))
        kept = None if reserved is None else _place(reserved)
        readers = sorted(_reader(u) for u in b.graph.users(value) if u.id in neighbors)
        results.append([str(out.type), out.type.layout, used, kept, readers])
    return [op.kind, repr(op.attrs), operands, results]


def _neighbors(graph: Graph, op: Op) -> frozenset[int]:
    """The ids of the operators that a tactic of ``op`` may compute with it."""
    known = graph.kept(_known_neighbors)
    if op.id not in known:
        on_gpu = all(o.type.is_static for o in op.outputs)  # the host computes sizes that depend on data
        tactics = TACTICS.get(op.kind, ()) if on_gpu else ()
        known[op.id] = frozenset(x.id for tactic in tactics for x in tactic.neighbors(graph, op))
    return known[op.id]


def _known_neighbors(graph: Graph) -> dict[int, frozenset[int]]:
    """The neighbors of operators, found when first asked for."""
    return {}


def _reader(op: Op) -> str:
    """The facts of a neighbor that reads the result."""
    if op.kind == "Conv":
        return f"{op.kind} {op.attrs!r} {op.outputs[0].type}"
    return f"{op.kind} {op.attrs!r}" if op.kind in ("MaxPool", "Pointwise") else op.kind


def _place(x: TensorView) -> Plain:
    """The type, shape and strides of a place, and its alignment (in elements, at most 8)."""
    strides = [s if n > 1 else 0 for n, s in zip(x.shape, x.strides, strict=True)]
    return [dtype_name(x.dtype), list(x.shape), strides, math.gcd(x.offset, 8) if x.offset else 8]


# ---------------------------------------------------------------- selection


Usable = tuple[list[Tactic], list[dict[str, str]]]
"""The tactics that can run an operator, and the refused ones with reasons."""


def usable(b: Builder, op: Op, tactics: Sequence[Tactic], selection: Selection) -> Usable:
    """The tactics that can run the operator, in order of preference, and the refused ones with reasons.

    If the selected providers have no tactic for it, our own are used: no library runs every operator.
    """
    refused: list[dict[str, str]] = []
    able: list[Tactic] = []
    for tactic in tactics:
        if tactic.provider not in selection.providers and tactic.provider != "own":
            continue
        why = tactic.refuse(b, op)
        if why is None and selection.row_invariant:
            why = _not_invariant(b, op, tactic)
        if why is None:
            able.append(tactic)
        else:
            refused.append({"tactic": tactic.name, "reason": why})
    listed = [t for t in able if t.provider in selection.providers] or [t for t in able if t.provider == "own"]
    after = {t.name: t.region(b, op).after for t in listed}
    fusing = next((t for t in listed if after[t.name]), None)
    if fusing is not None:  # tactics that do not compute the same neighbors are excluded
        reason = f"{fusing.name} computes its neighbor as well"
        others = [t for t in listed if after[t.name] != after[fusing.name]]
        refused += [{"tactic": t.name, "reason": reason} for t in others]
        listed = [t for t in listed if t not in others]
    return listed, refused


def _not_invariant(b: Builder, op: Op, tactic: Tactic) -> str | None:
    """Why a row of a tactic's result depends on the size of the batch, or None."""
    if not tactic.row_invariant:
        return "a row of its result depends on the size of the batch"
    offers = tactic.configs(b, op) if tactic.region(b, op).after else ()  # others are asked in their turn
    return _UNORDERED if offers and not any(o.row_invariant for o in offers) else None


_UNORDERED = "in each of its configurations, the order of a sum depends on the batch size"


def offers_of(
    b: Builder, op: Op, tactic: Tactic, selection: Selection, *, first: bool = False
) -> tuple[list[Offer | None], str | None]:
    """The configurations of a tactic within the selection's limits (``[None]``: it has no choice), or the reason why there is none.
    ``first``: no more than the first of them, which is quicker to find."""
    offers: list[Offer | None] = [*tactic.configs(b, op)]
    if not offers and tactic.provider == "own" and isinstance(tactic, ProblemTactic):
        return [], "none of its configurations fits"
    offers = offers or [None]
    if selection.row_invariant:
        offers = [o for o in offers if o is None or o.row_invariant]
        if not offers:
            return [], _UNORDERED
    if selection.workspace is not None:
        needed, fitting = list[int](), list[Offer | None]()
        for offer in offers:
            needed.append(_scratch(b, op, tactic, offer))
            if needed[-1] <= selection.workspace:
                fitting.append(offer)
                if first:
                    break
        if not fitting:
            return [], f"it needs {min(needed)} bytes of scratch memory; {selection.workspace} are allowed"
        offers = fitting
    return offers[:1] if first else offers, None


def _scratch(b: Builder, op: Op, tactic: Tactic, offer: Offer | None) -> int:
    """Bytes of scratch memory: everything except operands, constants and results."""
    first, tried = len(b.buffers), b.fork()
    tactic.place(tried, op)
    tactic.emit(tried, op, None if offer is None else offer.config)
    return scratch_bytes(tried, tactic.region(tried, op), first)


def scratch_bytes(b: Builder, region: Region, first: int) -> int:
    """Bytes of the buffers from number ``first`` on, without constants and the region's results."""
    results = results_of(b, region)
    return sum(x.nbytes or 0 for i, x in enumerate(b.buffers[first:], first) if x.blob is None and i not in results)


def results_of(b: Builder, region: Region) -> set[int]:
    """The buffers of a region's results."""
    values = [v for op in (region.anchor, *region.after) for v in op.values]
    return {b.place[v].buffer for v in values if v in b.place}


def choose(
    b: Builder, op: Op, tactics: Sequence[Tactic], selection: Selection, key: str, asked: Usable | None = None
) -> Site:
    """The site of an operator, with its results placed: as chosen for its signature ``key``, or by the first tactic that can run it.
    ``asked``: the result of :func:`usable`, if the caller already has it.

    Raises UnsupportedError if no tactic can, InternalError if the choice names no tactic or configuration.
    """
    chosen = selection.choices.get(key)
    if chosen is not None:
        named = next((t for t in tactics if t.name == chosen.tactic), None)
        if named is None:
            raise InternalError(f"{op.kind} {op.name}: there is no tactic {chosen.tactic}")
        only = replace(selection, providers=frozenset({named.provider}))  # the other providers need not be asked
        able, refused = usable(b, op, tactics, only) if asked is None else asked
        if named in able and _not_stored(b, named.region(b, op)) is None:
            able = [named]
        else:
            chosen = None  # it was measured after other choices for the earlier operators, and cannot run after these
    if chosen is not None:
        tactic = able[0]
        if chosen.config:
            offer: Offer | None = _named(b, op, tactic, chosen.config)
        else:
            offers, why = offers_of(b, op, tactic, selection, first=True)
            if why is not None:
                raise UnsupportedError(f"no kernel runs it ({tactic.name}: {why})")
            offer = offers[0]
    else:
        able, refused = usable(b, op, tactics, selection) if asked is None else asked
        found = untuned(b, op, tactics, able, selection, refused)
        if found is None:
            reasons = "; ".join(f"{r['tactic']}: {r['reason']}" for r in refused)
            raise UnsupportedError(f"no kernel runs it ({reasons})")
        tactic, offer = found
    region = tactic.region(b, op)
    tactic.place(b, op)
    return Site(region, key, tactic, offer, refused)


def untuned(
    b: Builder,
    op: Op,
    tactics: Sequence[Tactic],
    able: Sequence[Tactic],
    selection: Selection,
    refused: list[dict[str, str]],
) -> tuple[Tactic, Offer | None] | None:
    """The tactic and the configuration that preference and cost model choose among the ``able`` ones, without measurements; None
    without any. The refusals on the way are added to ``refused``."""
    for tactic in _in_turn(b, op, tactics, able, selection):
        if (why := tactic.defer(b, op)) is not None:
            refused.append({"tactic": tactic.name, "reason": why})
            continue
        offers, why = offers_of(b, op, tactic, selection, first=True)
        why = why or _not_stored(b, tactic.region(b, op))
        if why is not None:
            refused.append({"tactic": tactic.name, "reason": why})
            continue
        return tactic, offers[0]
    return None


def _not_stored(b: Builder, region: Region) -> str | None:
    """Why the launches of a region would lack an operand; None if all operands are stored."""
    own = {x.id for x in region.ops}
    for x in region.before:
        if not own.issuperset(o.id for o in b.joined.get(x.id, ())):
            return f"{x.name} is computed together with operators before it, whose results are not stored"
    return None


def emit_site(b: Builder, site: Site) -> Decision:
    """Add the launches of a site."""
    op, tactic, offer = site.op, site.tactic, site.offer
    steps, buffers = len(b.steps), len(b.buffers)
    variant = tactic.variant(b, op) if offer is None else offer.name
    tactic.emit(b, op, None if offer is None else offer.config)
    b.credit(steps, f"{tactic.name} {variant}".rstrip())
    choice = TacticChoice(tactic.name, "" if offer is None else offer.name)
    scratch = scratch_bytes(b, site.region, buffers)
    seconds = tactic.seconds(b, op) if offer is None else offer.seconds
    return Decision(site.region, site.key, choice, variant, len(b.steps) - steps, scratch, site.refused, seconds)


def dropped_decision(site: Site) -> Decision:
    """The record of a dropped site."""
    name = "" if site.offer is None else site.offer.name
    return Decision(site.region, site.key, TacticChoice(site.tactic.name, name), name, 0, 0, site.refused, dropped=True)


def _in_turn(
    b: Builder, op: Op, tactics: Sequence[Tactic], able: Sequence[Tactic], selection: Selection
) -> Iterator[Tactic]:
    """The tactics that can run the operator, then our own, in case the libraries' tactics are deferred."""
    yield from able
    if all(t.provider != "own" for t in able):
        yield from usable(b, op, tactics, replace(selection, providers=frozenset({"own"})))[0]


def _named(b: Builder, op: Op, tactic: Tactic, name: str) -> Offer:
    """The tactic's configuration of this name. Raises InternalError if there is none."""
    offer = tactic.named(b, op, name)
    if offer is None:
        raise InternalError(f"{op.kind} {op.name}: {tactic.name} has no configuration {name!r}")
    return offer


def alternatives(
    b: Builder, op: Op, tactics: Sequence[Tactic], selection: Selection
) -> Iterator[tuple[Tactic, Offer | None]]:
    """Every (tactic, configuration) that can run the operator and is worth a measurement, the preferred tactic's first.

    Our kernels without a cost model are left out after one with a cost model: they are slow general kernels.
    """
    able, _ = usable(b, op, tactics, selection)
    # Deferred tactics of ours come last. Libraries come after ours anyway, and asking them is slow.
    able.sort(key=lambda t: t.provider == "own" and t.defer(b, op) is not None)
    modeled = False
    for tactic in able:
        offers = offers_of(b, op, tactic, selection)[0]
        if modeled and tactic.provider == "own" and offers == [None]:
            continue
        for offer in offers:
            yield tactic, offer
        if offers and selection.row_invariant:
            return  # another tactic sums in another order, and the fastest one depends on the batch size
        modeled = modeled or any(o is not None for o in offers)
