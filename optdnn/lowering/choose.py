"""Which tactic runs an operator, and in which configuration: by preference and cost model, or as a table of choices says.

A choice is made per *signature*: everything about an operator that its speed depends on (kind, attributes, types, where operands
and results lie). Operators of one signature share their choice and its measurement.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from optdnn.config import BuildOptions
from optdnn.errors import InternalError, UnsupportedError
from optdnn.ir.digest import SMALL
from optdnn.ir.graph import Op, Value
from optdnn.kernels.builder import Builder, TensorView
from optdnn.kernels.conv.pooled import max_pool_behind
from optdnn.kernels.conv.separable import depthwise_before
from optdnn.kernels.libraries.providers import providers_here
from optdnn.kernels.tactic import PROVIDERS, Offer, Region, Tactic
from optdnn.runtime.program import Plain
from optdnn.target_name import TargetName
from optdnn.types import dtype_name


class TacticChoice(NamedTuple):
    """A tactic by name, and a configuration by name ("": it has none, or its first)."""

    tactic: str
    config: str = ""

    def __str__(self) -> str:
        return f"{self.tactic} {self.config}".rstrip()


@dataclass(frozen=True)
class Selection:
    """What may be chosen: ``providers`` (of :data:`PROVIDERS`), at most ``workspace`` bytes of scratch memory, sums in an order
    that no batch size decides; and ``choices`` by signature, which go before preference and cost model."""

    providers: frozenset[str] = frozenset(PROVIDERS)
    workspace: int | None = None
    row_invariant: bool = False
    choices: Mapping[str, TacticChoice] = field(default_factory=dict)

    @classmethod
    def of(cls, options: BuildOptions, choices: Mapping[str, TacticChoice] | None = None) -> Selection:
        """What the options of a build allow. The cost model (``tactics="heuristic"``) knows our own kernels alone; of libraries
        that are asked for beside it, each operation runs on what they rank first."""
        listed = frozenset(options.tactics.split(",")) - {"heuristic"}
        providers = frozenset(PROVIDERS) if options.tactics == "auto" else listed or frozenset({"own"})
        if not TargetName.parse(options.target).simulated and not providers <= {"own"}:
            providers &= providers_here(sure=options.tactics != "auto")
        return cls(providers, options.workspace, options.row_invariant, {} if choices is None else choices)


@dataclass
class Site:
    """What runs a region: a tactic in a configuration (None: it has no choice, or its first). ``refused`` says which tactics could
    not run it, and why; ``key`` is its signature. ``dropped``: another site's region has its operators."""

    region: Region
    key: str
    tactic: Tactic
    config: Any
    refused: Sequence[Mapping[str, str]]
    dropped: bool = False

    @property
    def op(self) -> Op:
        """The operator at whose place its launches stand."""
        return self.region.anchor


@dataclass(frozen=True)
class Decision:
    """The account of a site whose launches were made. ``variant`` names the kernel's form (the configuration, where there was a
    choice), ``launches`` how many there are, ``scratch`` the bytes that they alone use."""

    region: Region
    signature: str
    choice: TacticChoice
    variant: str
    launches: int
    scratch: int
    refused: Sequence[Mapping[str, str]]
    seconds: float | None = None
    """What the cost model predicts, where the configuration has one."""
    dropped: bool = False
    """Another launch computes what its own would."""

    @property
    def op(self) -> Op:
        """The operator at whose place its launches stand."""
        return self.region.anchor

    def to_plain(self) -> Plain:
        row: dict[str, Plain] = {"nodes": sorted(self.op.src), "kind": self.op.kind, "tactic": self.choice.tactic}
        row |= {"launches": self.launches, "signature": self.signature}
        if along := sorted(self.region.src - self.op.src):
            row["with"] = along  # what the launches compute beside the operator
        if self.variant:
            row["config" if self.choice.config else "variant"] = self.variant
        row |= {"scratch_bytes": self.scratch} if self.scratch else {}
        row |= {"refused": [dict(r) for r in self.refused]} if self.refused else {}
        return row | ({"dropped": True} if self.dropped else {})


# ---------------------------------------------------------------- signatures


def signature(b: Builder, op: Op) -> str:
    """A digest (32 hexadecimal digits) of everything about an operator that its speed depends on, but for the machine."""
    text = json.dumps(_facts(b, op), separators=(",", ":"))
    return hashlib.sha256(f"{b.arch} {text}".encode()).hexdigest()[:32]


def _facts(b: Builder, op: Op) -> list[Plain]:
    operands: list[Plain] = []
    for slot, value in enumerate(op.inputs):
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
        # A convolution that nobody else reads may become a part of this one: one that is added, or a depthwise one before a 1x1.
        joined = source.kind == op.kind == "Conv" and b.graph.sole_user(value) == op
        joined = joined and (slot > 0 or depthwise_before(b.graph, op) is not None)
        operands.append([_place(b.operand(value)), _facts(b, source) if joined else None])
    results: list[Plain] = []
    for port, out in enumerate(op.outputs):
        value = Value(op.id, port)
        reserved = b.reserved.get(value)
        used = bool(b.graph.uses(value))
        place = None if reserved is None else _place(reserved)
        results.append([str(out.type), out.type.layout, used, place, _followers(b, op, value)])
    return [op.kind, repr(op.attrs), operands, results]


TAKES_ALONG = frozenset({"Add", "Attention", "LayerNormalization", "RMSNormalization"})
"""Kinds with a tactic that makes what follows in the same launch."""


def _followers(b: Builder, op: Op, value: Value) -> list[Plain]:
    """What reads the result of an operator that may take it along."""
    if op.kind == "Conv":  # of what follows, a pool alone may be taken along
        pool = max_pool_behind(b.graph, op)
        return [f"MaxPool {pool.attrs!r}"] if pool is not None and pool.attrs.kernel_shape == (2, 2) else []
    users = b.graph.users(value) if op.kind in TAKES_ALONG else []
    return sorted(f"{u.kind} {u.attrs!r}" if u.kind == "Pointwise" else u.kind for u in users)


def _place(x: TensorView) -> Plain:
    strides = [s if n > 1 else 0 for n, s in zip(x.shape, x.strides, strict=True)]
    return [dtype_name(x.dtype), list(x.shape), strides, math.gcd(x.offset, 8) if x.offset else 8]


# ---------------------------------------------------------------- selection


def usable(
    b: Builder, op: Op, tactics: Sequence[Tactic], selection: Selection
) -> tuple[list[Tactic], list[dict[str, str]]]:
    """The tactics that may run the operator, in order of preference, and why the others may not.

    Where the providers that were asked for have none, our own stand in: no library runs every operator.
    """
    refused: list[dict[str, str]] = []
    able: list[Tactic] = []
    for tactic in tactics:
        if tactic.provider not in selection.providers and tactic.provider != "own":
            continue
        why = tactic.refuse(b, op)
        if why is None and selection.row_invariant and not tactic.row_invariant:
            why = "a row of its result depends on the size of the batch"
        if why is None:
            able.append(tactic)
        else:
            refused.append({"tactic": tactic.name, "reason": why})
    listed = [t for t in able if t.provider in selection.providers]
    joint = next((t for t in listed if t.region(b, op).after), None)
    if joint is not None:
        others = [t for t in listed if t is not joint]
        return [joint], refused + [
            {"tactic": t.name, "reason": f"{joint.name} does its neighbour's work, too"} for t in others
        ]
    if listed:
        return listed, refused
    return [t for t in able if t.provider == "own"], refused


def offers_of(b: Builder, op: Op, tactic: Tactic, selection: Selection) -> tuple[list[Offer | None], str | None]:
    """The configurations of a tactic that the selection allows (``[None]``: it has no choice), or why there is none."""
    offers: list[Offer | None] = [*tactic.configs(b, op)] or [None]
    if selection.row_invariant:
        offers = [o for o in offers if o is None or o.row_invariant]
        if not offers:
            return [], "in each of its configurations, the order of a sum depends on sizes"
    if selection.workspace is not None:
        sizes = [(_scratch(b, op, tactic, o), o) for o in offers]
        offers = [o for size, o in sizes if size <= selection.workspace]
        if not offers:
            least = min(size for size, _ in sizes)
            return [], f"it needs {least} bytes of scratch memory, of which {selection.workspace} are allowed"
    return offers, None


def _scratch(b: Builder, op: Op, tactic: Tactic, offer: Offer | None) -> int:
    """Bytes that the launches need beside operands, constants and results."""
    first = len(b.buffers)
    with b.rehearsal():
        tactic.place(b, op)
        tactic.emit(b, op, None if offer is None else offer.config)
        return scratch_bytes(b, tactic.region(b, op), first)


def scratch_bytes(b: Builder, region: Region, first: int) -> int:
    """Bytes of the buffers from number ``first`` on that are neither constants nor the region's results."""
    results = results_of(b, region)
    return sum(x.nbytes or 0 for i, x in enumerate(b.buffers[first:], first) if x.blob is None and i not in results)


def results_of(b: Builder, region: Region) -> set[int]:
    """The buffers of a region's results."""
    values = [Value(op.id, port) for op in (region.anchor, *region.after) for port in range(len(op.outputs))]
    return {b.place[v].buffer for v in values if v in b.place}


def choose(b: Builder, op: Op, tactics: Sequence[Tactic], selection: Selection, key: str) -> Site:
    """The tactic and configuration that were chosen for the operator's signature ``key``, or else the first tactic that may run it.
    The results of its region are placed.

    Raises UnsupportedError where there is none, InternalError for a choice that does not exist.
    """
    chosen = selection.choices.get(key)
    if chosen is not None:  # the other providers need not be asked
        theirs = {t.provider for t in tactics if t.name == chosen.tactic}
        selection = replace(selection, providers=frozenset(theirs or {"own"}))
    able, refused = usable(b, op, tactics, selection)
    if chosen is not None:
        able = [t for t in able if t.name == chosen.tactic]
        if not able:
            raise InternalError(f"{op.kind} {op.name}: the chosen tactic {chosen.tactic} cannot run it")
    limited = selection.row_invariant or selection.workspace is not None
    for tactic in able if chosen is not None else _in_turn(b, op, tactics, able, selection):
        config: Any = None
        if chosen is None and (why := tactic.defer(b, op)) is not None:
            refused.append({"tactic": tactic.name, "reason": why})
            continue
        if chosen is not None and chosen.config:
            config = named(b, op, tactic, chosen.config, key)
        elif limited:
            offers, why = offers_of(b, op, tactic, selection)
            if why is not None:
                refused.append({"tactic": tactic.name, "reason": why})
                continue
            config = None if offers[0] is None else offers[0].config
        region = tactic.region(b, op)
        tactic.place(b, op)
        return Site(region, key, tactic, config, refused)
    reasons = "; ".join(f"{r['tactic']}: {r['reason']}" for r in refused)
    raise UnsupportedError(f"no kernel runs it ({reasons})")


def emit_site(b: Builder, site: Site) -> Decision:
    """Add a site's launches."""
    op, tactic = site.op, site.tactic
    steps, buffers = len(b.steps), len(b.buffers)
    b.offered = []
    used = tactic.emit(b, op, site.config) or ""
    b.credit(steps, f"{tactic.name} {used}".rstrip())
    offered = b.offered or tactic.configs(b, op)
    name = used if any(o.name == used for o in offered) else ""
    scratch = scratch_bytes(b, site.region, buffers)
    seconds = next((o.seconds for o in offered if o.name == used), None)
    choice = TacticChoice(tactic.name, name)
    return Decision(site.region, site.key, choice, used, len(b.steps) - steps, scratch, site.refused, seconds)


def left_out(site: Site) -> Decision:
    """The account of a site whose operators are in another one's region."""
    name = "" if site.config is None else str(site.config)
    return Decision(site.region, site.key, TacticChoice(site.tactic.name, name), name, 0, 0, site.refused, dropped=True)


def _in_turn(
    b: Builder, op: Op, tactics: Sequence[Tactic], able: Sequence[Tactic], selection: Selection
) -> Iterator[Tactic]:
    """The tactics that may run the operator, then our own, should a library turn each of its down."""
    yield from able
    if all(t.provider != "own" for t in able):
        yield from usable(b, op, tactics, replace(selection, providers=frozenset({"own"})))[0]


_NAMED: dict[tuple[str, TacticChoice], Any] = {}
"""Configurations by signature and name: to make them is slow, and what they are follows from the signature."""


def named(b: Builder, op: Op, tactic: Tactic, name: str, key: str) -> Any:
    """A tactic's configuration of this name, for an operator of this signature. Raises InternalError where there is none."""
    if (told := tactic.read(name)) is not None:
        return told
    choice = TacticChoice(tactic.name, name)
    if (key, choice) not in _NAMED:
        for offer in tactic.configs(b, op):
            _NAMED[key, TacticChoice(tactic.name, offer.name)] = offer.config
    try:
        return _NAMED[key, choice]
    except KeyError:
        raise InternalError(f"{op.kind} {op.name}: {tactic.name} has no configuration {name!r}") from None


def alternatives(
    b: Builder, op: Op, tactics: Sequence[Tactic], selection: Selection
) -> Iterator[tuple[Tactic, Offer | None]]:
    """Every (tactic, configuration) that may run the operator and is worth trying, the preferred tactic's first.

    A kernel of ours without a cost model, behind one that has one, is for what the latter refuses, and slow.
    """
    able, _ = usable(b, op, tactics, selection)
    # What is not taken unmeasured comes behind what is (libraries are behind anyway, and slow to ask).
    able.sort(key=lambda t: t.provider == "own" and t.defer(b, op) is not None)
    modelled = False
    for tactic in able:
        offers = offers_of(b, op, tactic, selection)[0]
        if modelled and tactic.provider == "own" and offers == [None]:
            continue
        for offer in offers:
            yield tactic, offer
        if offers and selection.row_invariant:
            return  # another tactic sums in another order, and which is the fastest depends on the batch
        modelled = modelled or any(o is not None for o in offers)
