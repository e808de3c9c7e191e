"""``optdnn.Generator``: tokens in, tokens out, from the engine of a language model with a key-value cache."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Generator as PythonGenerator
from typing import Any, TypeAlias, overload

import numpy as np

from optdnn.errors import InputError, RunError, UsageError, machine_errors, warn
from optdnn.generation.feeds import Step
from optdnn.generation.gpu_steps import GpuSteps
from optdnn.generation.lengths import StepLengths
from optdnn.generation.ports import ports_of
from optdnn.generation.settings import Integer, Number, Settings, settings
from optdnn.generation.steps import BoundSteps, HostSteps
from optdnn.loading import load
from optdnn.runtime.engine import Engine
from optdnn.types import Array

Prompt: TypeAlias = Sequence[int]
OnToken: TypeAlias = Callable[[int, int], object]
"""Called with the number of a sequence and its next token."""
IteratorOfTokens: TypeAlias = PythonGenerator[tuple[int, int], None, None]
LEAST_CAPACITY = 64
"""Initial positions of elastic caches; the number doubles when they are full."""


class OneTokenPrefill(UserWarning):
    """An engine reads one token per step, so prompts are read token by token."""


class HostCaches(UserWarning):
    """Caches grow with each token: they pass through the host's memory, and each length has its own plan."""


class Generator:
    """Generates text with the engine of a language model: reads prompts, and samples one token after another.

    It holds the caches of a batch of sequences. Supported models: exports of onnxruntime-genai and Optimum (``input_ids``,
    ``attention_mask``, ``position_ids``, ``past_key_values.N.key`` and ``present.N.key``), and others whose inputs are named here.
    Tokens are numbers; a tokenizer converts them to text. Only one thread at a time may use a generator.

    ``Generator(engine, *, capacity=None, tokens=None, mask=None, positions=None, held=None, logits=None, state=None)``: ``engine``
    is an engine or its path. ``capacity`` bounds the positions of caches whose size the engine leaves open (None: they
    are enlarged when they are full). ``tokens``, ``mask``, ``positions`` (of each token) and ``held`` (number of positions in the
    caches) name inputs that are not found by their names, ``logits`` the output; ``state`` maps outputs to inputs: the
    caches.
    Raises UsageError for an engine without a cache or with an input of unknown role, and the errors of ``optdnn.load``.
    """

    def __init__(
        self,
        engine: Engine | str | os.PathLike[str],
        *,
        capacity: int | None = None,
        tokens: str | None = None,
        mask: str | None = None,
        positions: str | None = None,
        held: str | None = None,
        logits: str | None = None,
        state: Mapping[str, str] | None = None,
    ):
        """Identify the engine's inputs; the arguments are those of the class."""
        self.engine = engine if isinstance(engine, Engine) else load(engine)
        if capacity is not None and (not isinstance(capacity, int) or capacity < 1):
            raise UsageError(f"capacity must be a positive integer, not {capacity!r}")
        names = {"tokens": tokens, "mask": mask, "positions": positions, "held": held, "logits": logits}
        self._ports = ports_of(self.engine, names, state, capacity)
        self._most = self._capacity(capacity)
        self._lengths = StepLengths(self.engine, self._ports)
        self._ranks = self.engine.program.ranks is not None and self._ports.form == "fixed"
        on_gpu = self.engine.target.startswith("cuda") and self._ports.form != "growing"
        self._device = on_gpu and not self._ranks and _on_gpu(self.engine)
        self._tell()
        self._steps: HostSteps | GpuSteps | None = None
        self._running: IteratorOfTokens | None = None
        self.reset()

    @property
    def capacity(self) -> int | None:
        """The most positions that a sequence can have; None without a bound."""
        return self._most

    @property
    def vocabulary(self) -> int | None:
        """Size of the vocabulary; None if the engine does not show it."""
        return self._ports.vocabulary

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of each sequence of the conversation."""
        return tuple(int(n) + len(p) for n, p in zip(self._held[: self._count], self._pending, strict=True))

    def __repr__(self) -> str:
        room = "any length" if self._most is None else f"{self._most} positions"
        where = "in the engine" if self._ports.samples else "on the host"
        prefill = "one token a step" if self._lengths.most == 1 else "many tokens a step"
        return (
            f"Generator({self.engine.target}, {self.engine.precision}: {self._ports.form} caches, {room}; "
            f"sampling {where}; prompts {prefill}; {self._count} sequences held)"
        )

    def reset(self) -> None:
        """Forget the conversation. Memory of the caches is kept."""
        self._end()
        self._forget()

    def _forget(self) -> None:
        """Hold no sequences."""
        self._count = 0
        self._held = np.zeros(0, np.int64)
        self._pending: list[list[int]] = []
        self._seen = np.zeros((0, 0), bool)
        if self._ports.form == "growing":
            self._steps = None

    @overload
    def generate(self, prompts: Prompt, *, max_new_tokens: int, stop_tokens: Iterable[int] = ..., temperature: Number = ...,
                 top_k: Integer = ..., top_p: Number = ..., seed: Integer = ..., extend: bool = ...,
                 on_token: OnToken | None = ...) -> list[int]: ...  # fmt: skip
    @overload
    def generate(self, prompts: Sequence[Prompt], *, max_new_tokens: int, stop_tokens: Iterable[int] = ...,
                 temperature: Number = ..., top_k: Integer = ..., top_p: Number = ..., seed: Integer = ..., extend: bool = ...,
                 on_token: OnToken | None = ...) -> list[list[int]]: ...  # fmt: skip
    def generate(
        self,
        prompts: Any,
        *,
        max_new_tokens: int,
        stop_tokens: Iterable[int] = (),
        temperature: Number = 0.0,
        top_k: Integer = 0,
        top_p: Number = 1.0,
        seed: Integer = 0,
        extend: bool = False,
        on_token: OnToken | None = None,
    ) -> list[int] | list[list[int]]:
        """The new tokens after a prompt (a list of tokens), or after each of several prompts, which may differ in length.

        A sequence ends with a token of ``stop_tokens`` (it is the last one returned), or after ``max_new_tokens``.
        ``temperature`` 0 takes the most probable token. ``top_k`` (0: all) and ``top_p`` (1: all) limit the tokens to draw from.
        The same ``seed`` gives the same tokens; sequence b of a batch has ``seed + b``. Settings may be lists with one value per
        sequence. With ``extend`` the prompts continue the conversation: the last prompts and their tokens.
        ``on_token`` is called with each token as soon as it is known, with the number of its sequence and the token.
        Raises UsageError for settings and InputError for prompts before anything is computed: for a token outside of the
        vocabulary, or more positions than the caches have. Raises RunError if logits contain NaN: the conversation is then lost.
        """
        single, given = _prompts(prompts)
        found: list[list[int]] = [[] for _ in given]
        chosen = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        for b, token in self._generated(given, max_new_tokens, stop_tokens, extend, chosen):
            found[b].append(token)
            if on_token is not None:
                on_token(b, token)
        return found[0] if single else found

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int,
        stop_tokens: Iterable[int] = (),
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        extend: bool = False,
    ) -> Iterator[int]:
        """The new tokens after one prompt, each as soon as it is known; otherwise like :meth:`generate`.

        Prompt and settings are checked immediately. A caller that stops reading closes the iterator: the conversation then has the
        tokens that were read.
        """
        single, given = _prompts(prompt)
        if not single:
            raise UsageError("stream takes one prompt", hint="generate(prompts, on_token=...) streams several")
        chosen = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        made = self._generated(given, max_new_tokens, stop_tokens, extend, chosen)
        return (token for _, token in made)

    # ---------------------------------------------------------------- one call

    def _generated(
        self, prompts: list[list[int]], most: int, stop_tokens: Iterable[int], extend: bool, chosen: Mapping[str, Any]
    ) -> IteratorOfTokens:
        """Check everything and begin. Yields pairs of sequence and token in the order in which they are drawn."""
        if not isinstance(most, int) or most < 1:
            raise UsageError(f"max_new_tokens must be a positive integer, not {most!r}")
        try:
            stops = frozenset(map(operator.index, stop_tokens))
        except TypeError:
            raise UsageError(f"stop_tokens must be a list of tokens, not {stop_tokens!r}") from None
        if extend and self._count not in (0, len(prompts)):
            raise UsageError(f"extend takes a prompt for each of the {self._count} sequences held, not {len(prompts)}")
        batch = self._ports.batch or len(prompts)
        if len(prompts) > batch:
            raise InputError(f"{len(prompts)} prompts are given; the engine takes {batch} sequences")
        told = settings(len(prompts), batch, **chosen)
        self._end()
        if not extend or not self._count:
            self._check(prompts, [0] * len(prompts), most)
            self.reset()
            self._count, self._held = len(prompts), np.zeros(batch, np.int64)
            self._pending = [[] for _ in prompts]
            self._seen = np.zeros((batch, 0), bool)
        else:
            self._check(prompts, list(self.lengths), most)
        fed = [[*before, *new] for before, new in zip(self._pending, prompts, strict=True)]
        positions = max(self._ends(fed, most))
        with machine_errors(f"a cache of {positions} positions", RunError):
            self._make_room(positions, batch)
        if self._ports.form != "growing":
            self._step_lengths(fed)
        self._running = self._run(fed, most, stops, told)
        return self._running

    def _end(self) -> None:
        """End an iterator that a caller may still hold."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _check(self, prompts: list[list[int]], held: Sequence[int], most: int) -> None:
        """Raise InputError for prompts that cannot be continued by ``most`` tokens."""
        size = self._ports.vocabulary
        for b, (prompt, before) in enumerate(zip(prompts, held, strict=True)):
            if not prompt and not before:
                raise InputError(f"prompt {b} is empty", hint="begin with a token, such as the tokenizer's first one")
            wrong = [t for t in prompt if t < 0 or (size is not None and t >= size)]
            if wrong:
                known = "" if size is None else f"; the vocabulary has {size}"
                raise InputError(f"prompt {b} holds token {wrong[0]}{known}")
            total = before + len(prompt) + most - 1
            if self._most is not None and total > self._most:
                behind = f" after {before} earlier ones" if before else ""
                raise InputError(
                    f"prompt {b} of {len(prompt)} tokens{behind} and {most} new ones need {total} positions; the caches have "
                    f"{self._most}",
                    hint="fewer tokens, reset(), or an engine of a larger capacity",
                )
        lengths = {before + len(p) for p, before in zip(prompts, held, strict=True)}
        if len(lengths) > 1 and not self._ports.ragged:
            raise InputError(
                f"prompts of different lengths ({min(lengths)} to {max(lengths)} tokens) need an engine that knows where each "
                "sequence ends",
                hint="generate them one by one, or export the model with attention_mask and position_ids",
            )

    def _ends(self, fed: Sequence[Sequence[int]], most: int) -> list[int]:
        """The total number of positions that each sequence takes; the last token is not fed."""
        return [int(held) + len(new) + most - 1 for held, new in zip(self._held, fed, strict=False)]

    def _make_room(self, positions: int, batch: int) -> None:
        """Make the steps with caches of this many positions, and keep the contents of the caches."""
        ports = self._ports
        if self._steps is not None and self._steps.batch != batch:
            self._steps = None  # a new number of sequences starts again
        capacity = None if ports.form == "growing" else ports.capacity
        if ports.form == "elastic":
            capacity = LEAST_CAPACITY
            while capacity < positions:
                capacity *= 2
            capacity = max(capacity, self._lengths.least_capacity)
            capacity = capacity if self._most is None else min(capacity, self._most)
        if self._steps is None:
            kind: Any = GpuSteps if self._device else BoundSteps if self._ranks else HostSteps
            self._steps = kind(self.engine, ports, batch, capacity)
        elif capacity is not None and self._steps.capacity is not None and capacity > self._steps.capacity:
            self._steps = self._steps.enlarged(self.engine, capacity)

    def _run(self, fed: list[list[int]], most: int, stops: frozenset[int], told: Settings) -> IteratorOfTokens:
        """Prefill, then one token per step. The conversation is valid after each token that is yielded.

        A failure ends the conversation and drops the caches: a NaN in a cache stays NaN even if its weight is zero.
        """
        try:
            yield from self._run_steps(fed, most, stops, told)
        except RunError as error:
            if error.hint is None and self._most is None:
                held = int(self._held.max(initial=0))
                error.hint = (
                    f"the caches hold {held} positions; if the model takes no more, give its number: --capacity {held} "
                    f"(in Python: capacity={held}), and fewer new tokens"
                )
            self._forget()
            self._steps = None
            raise

    def _run_steps(self, fed: list[list[int]], most: int, stops: frozenset[int], told: Settings) -> IteratorOfTokens:
        first = self._prefill(fed, told)
        live = np.ones(self._count, bool)
        for k, tokens in enumerate(self._tokens(first, most, told)):
            if k:  # the step has read the tokens before it
                self._held[: self._count] += live
                self._grow(1, live, None)
            new = [(int(b), int(tokens[b])) for b in np.flatnonzero(live)]
            for b, token in new:
                self._pending[b] = [token]
                live[b] = token not in stops
            yield from new
            if not live.any():
                return

    def _tokens(self, first: Array, most: int, told: Settings) -> Iterator[Array]:
        yield first
        assert self._steps is not None
        if most == 1:
            return
        batch = len(self._held)
        held, row = self._held.copy(), np.zeros(batch, np.int64)
        if self._ports.form != "growing":
            yield from self._steps.following(Step(first[:, None], held, row, told), most - 1)
            return
        for _ in range(most - 1):
            front = np.zeros(batch, np.int64)
            first = self._steps.run(Step(first[:, None], held, row, told, front, self._seen))
            held = held + 1
            yield first

    def _grow(self, length: int, kept: Array, front: Array | None) -> None:
        """Record the columns by which growing caches grew, and the sequences that they belong to."""
        if self._ports.form != "growing":
            return
        batch = len(self._held)
        real = np.zeros((batch, length), bool)
        real[: self._count] = kept[:, None]
        if front is not None:
            real &= np.arange(length) >= front[:, None]
        self._seen = np.concatenate([self._seen, real], axis=1)

    def _prefill(self, fed: list[list[int]], told: Settings) -> Array:
        """Read the prompts; the first tokens [batch]."""
        rows = self._rows(fed)
        self._pending = [[] for _ in fed]
        if self._ports.form == "growing":
            return self._prefill_growing(rows, told)
        return self._prefill_in_place(rows, told)

    def _rows(self, fed: list[list[int]]) -> list[list[int]]:
        """The tokens to read for each sequence of the batch; sequences without a prompt read a token whose result is dropped."""
        return [*fed, *[[0]] * (len(self._held) - len(fed))]

    def _step_lengths(self, fed: list[list[int]]) -> list[int]:
        """The lengths of the steps that read the prompts. Raises InputError if padding has no room."""
        assert self._steps is not None
        counts, held = np.array([len(r) for r in self._rows(fed)]), self._held
        found: list[int] = []
        while (left := int(counts.max())) > 0:
            found.append(self._lengths.step(left, (self._steps.capacity or 0) - int(held.max())))
            taken = np.minimum(counts, found[-1])
            held, counts = held + taken, counts - taken
        return found

    def _prefill_in_place(self, rows: list[list[int]], told: Settings) -> Array:
        """Prompts aligned left, padded on the right: later tokens overwrite the padding's positions."""
        assert self._steps is not None
        counts = np.array([len(r) for r in rows])
        tokens, done = np.zeros(len(rows), np.int64), 0
        for length in self._step_lengths(rows):
            taken = np.clip(counts - done, 0, length)
            block = np.zeros((len(rows), length), np.int64)
            for b, row in enumerate(rows):
                block[b, : taken[b]] = row[done : done + length]
            drawn = self._steps.run(Step(block, self._held, np.maximum(taken - 1, 0), told))
            ends = (counts > done) & (counts <= done + length)
            tokens[ends] = drawn[ends]
            self._held = self._held + taken
            done += length
        return tokens

    def _prefill_growing(self, rows: list[list[int]], told: Settings) -> Array:
        """Prompts aligned right, padded on the left: a step appends its columns to all sequences."""
        assert self._steps is not None
        counts = np.array([len(r) for r in rows])
        width, done = int(counts.max()), 0
        front = width - counts
        tokens = np.zeros(len(rows), np.int64)
        whole = np.zeros((len(rows), width), np.int64)
        for b, row in enumerate(rows):
            whole[b, front[b] :] = row
        while done < width:
            length = self._lengths.step(width - done, width - done, exact=True)
            before = np.clip(front - done, 0, length)
            row_at = np.full(len(rows), length - 1)
            step = Step(whole[:, done : done + length], self._held, row_at, told, before, self._seen)
            tokens = self._steps.run(step)
            self._grow(length, np.ones(self._count, bool), before)
            self._held = self._held + length - before
            done += length
        return tokens

    # ---------------------------------------------------------------- the engine

    def _capacity(self, asked: int | None) -> int | None:
        """The most positions of a sequence. Raises UsageError if the engine has caches of another size."""
        own = self._ports.capacity
        if self._ports.form == "fixed":
            if asked not in (None, own):
                raise UsageError(f"the caches of the engine have {own} positions, not {asked}")
            return own
        if self._ports.form == "growing":
            return asked
        symbols = [c.input.shape[c.axis] for c in self._ports.caches]
        most = [p[n].max for p in self.engine.profiles for n in symbols if isinstance(n, str) and n in p]
        return min([*most, asked] if asked else most, default=None)

    def _tell(self) -> None:
        """Warn about settings of the engine that make generation slow."""
        if self._lengths.most == 1:
            warn(
                "the engine takes one token a step: prompts are read token by token. For prompts in few steps, build it "
                f"with a range of lengths: --shape {self._ports.tokens.name}=...x1..1..512",
                OneTokenPrefill,
            )  # fmt: skip
        if self.engine.target.startswith("cuda") and self._ports.form == "growing":
            warn(
                "the caches grow with each token: each length has its own plan, and caches go over the host's memory. "
                "Export a cache of fixed capacity (GroupQueryAttention or TensorScatter)",
                HostCaches,
            )  # fmt: skip


def _on_gpu(engine: Engine) -> bool:
    """Whether a GPU runs the engine, instead of NumPy (``load(simulate=True)``)."""
    return all(f.get("executor") != "simulate" for f in engine.facts)


def _prompts(given: Any) -> tuple[bool, list[list[int]]]:
    """Whether there is only one prompt, and all prompts as lists. Raises UsageError for anything else."""
    if isinstance(given, (str, bytes)):
        raise UsageError("a prompt is a list of tokens, not text", hint="tokenizer.encode(text).ids")
    try:
        rows = list(given)
        single = not rows or not isinstance(rows[0], (Sequence, np.ndarray))
        found = [[operator.index(t) for t in row] for row in ([rows] if single else rows)]
    except TypeError:
        raise UsageError(f"a prompt is a list of tokens (integers), not {given!r}") from None
    return single, found
