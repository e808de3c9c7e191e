"""The roles of a language model's inputs and outputs: tokens, positions, masks, counters and caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optdnn.dim import evaluate
from optdnn.dim_text import parse_dim
from optdnn.errors import OptdnnError, UsageError
from optdnn.runtime.contexts.sampled import PREFIX, ROW, SETTINGS, TOKEN
from optdnn.runtime.engine import Engine
from optdnn.types import TensorSpec, is_float

TOKENS = ("input_ids", "tokens", "token", "ids", "token_ids", "input")
MASKS = ("attention_mask", "mask")
POSITIONS = ("position_ids", "positions", "position")
"""With two axes: the position of each token."""
COUNTERS: Mapping[str, int] = {
    **dict.fromkeys(("at", "position", "held", "past_length", "past_sequence_length", "past_seq_len", "cache_length",
                     "write_indices", "start_pos", "start_position", "offset"), 0),
    **dict.fromkeys(("total_sequence_length", "total_length", "nonpad_kv_seqlen", "kv_lengths"), 1),
    "seqlens_k": 2,
}  # fmt: skip
"""Inputs with one value per sequence, or one in total: the positions before a step (0), after it (1), or one less than that (2)."""
PAST, PRESENT = ("past_key_values.", "past_", "past."), ("present.", "present_", "new.", "new_", "present_key_values.")
"""Prefixes of the names of caches: of inputs, and of outputs."""


_OTHER = (
    "is it the engine of a language model? An input or output of another name: Generator(engine, {}=NAME), in Python"
)


@dataclass(frozen=True)
class Cache:
    """A cache: an output that is an input of the next step. ``axis``: the axis of its positions."""

    output: TensorSpec
    input: TensorSpec
    axis: int


@dataclass(frozen=True)
class Counter:
    """An input that counts positions: the held ones (plus the ``length`` of the step, and ``more``)."""

    spec: TensorSpec
    with_length: bool
    more: int

    @property
    def is_single(self) -> bool:
        """Whether it holds one value for all sequences."""
        return not self.spec.shape or self.spec.shape[0] == 1

    @property
    def is_total(self) -> bool:
        """Whether it counts the positions after a step; a single value is then the largest of all sequences."""
        return self.with_length and not self.more


@dataclass(frozen=True)
class Ports:
    """The roles of an engine's inputs and outputs.

    ``form`` is "fixed" (caches of one capacity), "elastic" (caches of a capacity that the caller chooses) or "growing" (a step
    appends its positions). ``logits`` is None if the engine samples; ``row`` tells whether it then reads the index of the last row.
    """

    tokens: TensorSpec
    mask: TensorSpec | None
    positions: TensorSpec | None
    counters: tuple[Counter, ...]
    caches: tuple[Cache, ...]
    logits: TensorSpec | None
    row: bool
    form: str
    vocabulary: int | None

    @property
    def samples(self) -> bool:
        """Whether the engine itself samples."""
        return self.logits is None

    @property
    def batch(self) -> int | None:
        """The number of sequences in a step; None if the engine accepts any number."""
        size = self.tokens.shape[0]
        return size if isinstance(size, int) else None

    @property
    def capacity(self) -> int | None:
        """Positions of the caches, if the engine knows them."""
        size = self.caches[0].input.shape[self.caches[0].axis]
        return size if isinstance(size, int) else None

    @property
    def ragged(self) -> bool:
        """Whether sequences of different lengths can share a batch."""
        if self.form == "growing":
            return self.mask is not None and self.positions is not None and not self.counters
        if any(c.is_single and not c.is_total for c in self.counters):
            return False
        return self.mask is not None or any(not c.is_single for c in self.counters)


def ports_of(
    engine: Engine, names: Mapping[str, str | None], state: Mapping[str, str] | None, capacity: int | None = None
) -> Ports:
    """The roles of an engine's inputs and outputs, by their names.

    ``names`` gives the names of roles with other names ("tokens", "mask", "positions", "held", "logits"), ``state`` the
    caches (output -> input). Raises UsageError for an engine without a cache, or with an input that fits no role.
    """
    ins, outs = {s.name: s for s in engine.inputs}, {s.name: s for s in engine.outputs}
    for role, name in names.items():
        if name is not None and name not in (outs if role == "logits" else ins):
            known = ", ".join(outs if role == "logits" else ins)
            raise UsageError(f"{role}={name!r}: the engine has no such port", hint=f"there are {known}")
    tokens = _named(ins, names["tokens"], TOKENS, lambda s: not is_float(s.dtype))
    if tokens is None or len(tokens.shape) != 2:
        raise UsageError(f"no input [batch, length] of {engine} is tokens", hint=_OTHER.format("tokens"))
    mask = _named(ins, names["mask"], MASKS, lambda s: len(s.shape) == 2)
    caches, form = _formed(_caches(engine, state, {tokens.name}), tokens, mask, capacity)
    positions = _named(ins, names["positions"], POSITIONS, lambda s: len(s.shape) == 2)
    counters = _counters(ins, names["held"])
    used = {tokens.name, *(c.input.name for c in caches), *(c.spec.name for c in counters)}
    used |= {s.name for s in (mask, positions) if s is not None}
    row = ROW in ins
    left = [n for n in ins if n not in used and not n.startswith(PREFIX)]
    if left:
        shown = ", ".join(str(ins[n]) for n in left)
        raise UsageError(
            f"the engine takes {shown}, whose role is unknown",
            hint="name their roles (tokens=, mask=, positions=, held=, state=), or give them values when it is built: --value",
        )
    if TOKEN in outs and f"{PREFIX}{SETTINGS[0]}" in ins:
        told = engine.meta.get("sampling", {}).get("vocabulary")
        return Ports(tokens, mask, positions, counters, caches, None, row, form, told)
    others = [s for s in engine.outputs if s.name not in {c.output.name for c in caches}]
    logits = outs[names["logits"]] if names["logits"] else next((s for s in others if s.name == "logits"), None)
    logits = logits or next((s for s in others if is_float(s.dtype)), None)
    if logits is None or len(logits.shape) not in (2, 3):
        raise UsageError(f"no output of {engine} is logits", hint=_OTHER.format("logits"))
    size = logits.shape[-1]
    return Ports(tokens, mask, positions, counters, caches, logits, row, form, size if isinstance(size, int) else None)


def _named(ins: Mapping[str, TensorSpec], given: str | None, known: Sequence[str], fits: Any) -> TensorSpec | None:
    """The input of a role: the named one, otherwise the first with a known name that fits."""
    if given is not None:
        return ins[given]
    return next((ins[n] for n in known if n in ins and fits(ins[n])), None)


def _counters(ins: Mapping[str, TensorSpec], held: str | None) -> tuple[Counter, ...]:
    kinds = {**{n: k for n, k in COUNTERS.items() if n in ins}, **({held: 0} if held else {})}
    found = []
    for name, kind in kinds.items():
        spec = ins[name]
        if len(spec.shape) < 2 or spec.shape[1] == 1:
            found.append(Counter(spec, kind > 0, -1 if kind == 2 else 0))
    return tuple(found)


def _caches(engine: Engine, state: Mapping[str, str] | None, others: set[str]) -> list[tuple[TensorSpec, TensorSpec]]:
    """The pairs of output and input."""
    ins, outs = {s.name: s for s in engine.inputs}, {s.name: s for s in engine.outputs}
    if state is not None:
        for name, target in state.items():
            if name not in outs or target not in ins:
                raise UsageError(f"state {name!r} -> {target!r}: the engine has no such output or input")
        return [(outs[o], ins[i]) for o, i in state.items()]
    stems = {_stem(n, PAST): s for n, s in ins.items() if n not in others and len(s.shape) >= 3}
    return [(s, stems[stem]) for n, s in outs.items() if len(s.shape) >= 3 and (stem := _stem(n, PRESENT)) in stems]


def _stem(name: str, beginnings: Sequence[str]) -> str:
    """A cache's name without the part that distinguishes inputs from outputs."""
    found = next((name.removeprefix(b) for b in beginnings if name.startswith(b)), name)
    return found.replace("past", "").replace("present", "")


def _formed(
    pairs: Sequence[tuple[TensorSpec, TensorSpec]], tokens: TensorSpec, mask: TensorSpec | None, capacity: int | None
) -> tuple[tuple[Cache, ...], str]:
    """The caches with their axes, and their form."""
    if not pairs:
        raise UsageError(
            "the engine has no key-value cache: each token would recompute all earlier ones",
            hint="export the model with past_key_values, or name the caches: Generator(engine, state={OUTPUT: INPUT})",
        )
    width = capacity if mask is None or isinstance(mask.shape[1], str) else mask.shape[1]
    caches = tuple(Cache(o, i, _axis(i, tokens, width)) for o, i in pairs)
    sizes = [c.input.shape[c.axis] for c in caches]
    known = {n for n in sizes if isinstance(n, int)}
    if len(known) > 1 or (known and not all(isinstance(n, int) for n in sizes)):
        least = min(known)
        odd = next(c for c, n in zip(caches, sizes, strict=True) if n == least)
        raise UsageError(
            f"{odd.input} is a state of a fixed size, such as that of a convolution or of a window, beside caches of other sizes: "
            "Generator knows caches of one number of positions only",
            hint="run the engine step by step: each step takes the states that the one before returned. onnxruntime-genai's "
            "builder writes whole caches instead of windows with --extra_options windowed_kv_cache=false",
        )
    if known:
        return caches, "fixed"
    if all(_keeps(c, tokens) for c in caches):
        return caches, "elastic"
    return caches, "growing"


def _axis(spec: TensorSpec, tokens: TensorSpec, width: int | str | None) -> int:
    """The axis of positions: a symbolic axis after the batch, otherwise the last but one, or an axis of size ``width``."""
    symbolic = [k for k, d in enumerate(spec.shape) if k and isinstance(d, str) and d not in tokens.shape[:1]]
    last = len(spec.shape) - 2
    wide = [k for k, d in enumerate(spec.shape) if 0 < k <= last and d == width]
    return symbolic[0] if symbolic else wide[0] if wide and last not in wide else last


def _keeps(cache: Cache, tokens: TensorSpec) -> bool:
    """Whether a cache with room keeps its size: GroupQueryAttention writes into it."""
    size = cache.output.shape[cache.axis]
    if size == cache.input.shape[cache.axis]:
        return True
    expression = parse_dim(str(size))
    if expression is None:
        return False
    sizes = {s.name: 1 if s.name in tokens.shape else 64 for s in expression.symbols()}
    try:
        return evaluate(expression, sizes) == 64
    except OptdnnError:
        return False
