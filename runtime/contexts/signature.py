"""The inputs and outputs of an engine, and the checks of a caller's arrays: names, dtypes, shapes, memory.

Nothing is cast silently. The usual call passes correct arrays. So a check that succeeds is cheap, and messages are composed only
when one fails.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import numpy as np

from optdnn.dim import Dim, DimLike, evaluate
from optdnn.dim_text import expressions, parse_dim
from optdnn.errors import EngineError, InputError, ShapeError, did_you_mean
from optdnn.ranges import DimRange, Profile
from optdnn.runtime.contexts.dlpack import from_dlpack, offers
from optdnn.runtime.program import Plain, Program, agree
from optdnn.types import Array, DType, TensorSpec, dtype_name

Sizes = dict[str, int]
"""Symbol -> the size it has in one call."""
Bounds: TypeAlias = tuple[DimLike, DimLike, str]
"""Bounds of an input that holds positions or lengths: the lowest, the highest, and the operator that sets them. Kernels on a
GPU cannot refuse a value that is out of bounds."""


class Signature:
    """Inputs and outputs of an engine, in ONNX order."""

    def __init__(
        self,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        profiles: Sequence[Profile] = (),
        bounds: Mapping[str, Bounds] | None = None,
    ):
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.profiles = tuple(profiles)
        """Sizes of symbols that the engine accepts: inside of any of these (without any: all sizes)."""
        self.derived: dict[str, Dim] = expressions(
            (d for s in inputs for d in s.shape), {n for p in profiles for n in p}
        )
        """Dimensions of inputs that are expressions of symbols; the symbols are other dimensions of inputs."""
        self.bounds = dict(bounds or {})
        """Input -> the least and the largest of the positions or lengths that it may hold."""
        self._in = tuple((s.name, s.dtype) for s in inputs)
        self._out = {s.name: s for s in outputs}

    @classmethod
    def of(cls, program: Program) -> Signature:
        """The signature of a program. Raises EngineError for malformed bounds."""
        inputs, outputs = ([spec for spec, _ in ports] for ports in (program.inputs, program.outputs))
        return cls(inputs, outputs, program.profiles, bounds_of(program.meta.get("bounds", {})))

    def arrays(self, feeds: Mapping[str, Any]) -> list[Array]:
        """The arrays of ``feeds`` in input order, C-contiguous and aligned (copied if they are not).

        Raises InputError for a missing or unknown name, and for a dtype that is not exactly the input's.
        """
        if type(feeds) is not dict and not isinstance(feeds, Mapping):
            feeds = self.named(feeds)
        arrays = []
        try:
            for name, dtype in self._in:
                a = feeds[name]
                if type(a) is not np.ndarray or a.dtype != dtype:
                    a = self._as_array(name, a, dtype)
                flags = a.flags
                if not flags.carray and not (flags.c_contiguous and flags.aligned):  # carray: writeable, too
                    a = a.copy(order="C")
                arrays.append(a)
        except KeyError:
            self._refuse_names(feeds)
        if len(feeds) != len(arrays):
            self._refuse_names(feeds)
        return arrays

    def named(self, feeds: Any) -> Mapping[str, Any]:
        """``feeds`` by name; ``feeds`` may be the array of a single input. Raises InputError for anything else than mappings."""
        if isinstance(feeds, Mapping):
            return feeds
        if len(self.inputs) != 1 or not (hasattr(feeds, "__array__") or offers(feeds)):
            self._refuse_names(feeds)
        return {self.inputs[0].name: feeds}

    def in_order(self, feeds: Mapping[str, Any]) -> list[Any]:
        """The values of ``feeds`` in input order, unchanged. Raises InputError for a missing or unknown name."""
        if feeds.keys() != {s.name for s in self.inputs}:
            self._refuse_names(feeds)
        return [feeds[s.name] for s in self.inputs]

    def sizes(self, arrays: Sequence[Array]) -> Sizes:
        """The size of every symbol. Raises InputError like :meth:`sizes_at`."""
        return self.sizes_at([a.shape for a in arrays])

    def sizes_at(self, shapes: Sequence[tuple[int, ...]]) -> Sizes:
        """The size of every symbol, from the shapes of the inputs.

        Raises InputError if ranks or sizes do not fit, if symbols disagree, if a dimension differs from the value of its
        expression, or if no profile allows the sizes.
        """
        sizes: Sizes = {}
        later: list[tuple[TensorSpec, tuple[int, ...], int]] = []
        origin: dict[str, str] = {}
        for spec, shape in zip(self.inputs, shapes, strict=True):
            if len(shape) != len(spec.shape):
                _refuse_shape(spec, shape, f"rank {len(shape)} instead of {len(spec.shape)}")
            for axis, (want, got) in enumerate(zip(spec.shape, shape, strict=True)):
                if isinstance(want, int):
                    if want != got:
                        _refuse_shape(spec, shape, f"axis {axis} is {got} instead of {want}")
                elif want in self.derived:
                    later.append((spec, shape, axis))
                elif sizes.setdefault(want, got) != got:
                    _refuse_shape(spec, shape, f"{want} is {got} on axis {axis}, but {sizes[want]} {origin[want]}")
                else:
                    origin.setdefault(want, f"on axis {axis} of input {spec.name!r}")
        for spec, shape, axis in later:
            self._check_derived(spec, shape, axis, sizes, origin)
        if self.profiles and not any(_inside(p, sizes) for p in self.profiles):
            self._refuse_sizes(sizes, origin)
        return sizes

    def check_bounds(self, arrays: Sequence[Array], sizes: Sizes) -> None:
        """Raise InputError for an array with an element outside of the bounds of its input. All inputs, in order."""
        self.check_bounds_of({s.name: a for s, a in zip(self.inputs, arrays, strict=True)}, sizes)

    def check_bounds_of(self, arrays: Mapping[str, Array], sizes: Sizes) -> None:
        """:meth:`check_bounds` for some inputs, by name."""
        for name, a in arrays.items():
            limits = self.bounds.get(name)
            if limits is None or not a.size:
                continue
            low, high = (d if isinstance(d, int) else evaluate(d, sizes) for d in limits[:2])
            least, most = (int(a.item()),) * 2 if a.size == 1 else (int(a.min()), int(a.max()))
            if least < low or most > high:
                raise InputError(
                    f"input {name!r} holds {least if least < low else most}; {limits[2]} takes {low} to {high}"
                )

    def checked(
        self, feeds: Mapping[str, Any], out: Mapping[str, Any] | None
    ) -> tuple[list[Array], list[Array | None]]:
        """The arrays of ``feeds``, and the caller's buffers, in order, with everything checked. Raises InputError."""
        arrays = self.arrays(feeds)
        sizes = self.sizes(arrays)
        self.check_bounds(arrays, sizes)
        return arrays, [None] * len(self.outputs) if out is None else self.out_buffers(out, sizes, arrays)

    def _check_derived(
        self, spec: TensorSpec, shape: tuple[int, ...], axis: int, sizes: Sizes, origin: Mapping[str, str]
    ) -> None:
        text = str(spec.shape[axis])
        expression = self.derived[text]
        try:
            want: object = evaluate(expression, sizes)
        except ShapeError as error:
            want = error.message  # no size at all: a division by zero
        if want != shape[axis]:
            names = sorted(s.name for s in expression.symbols())
            known = " and ".join(f"{n} is {sizes[n]} {origin[n]}" for n in names)
            _refuse_shape(spec, shape, f"axis {axis} is {shape[axis]}, but {text} is {want}: {known}")

    def out_buffers(
        self, out: Mapping[str, Any], sizes: Mapping[str, int], arrays: Sequence[Array]
    ) -> list[Array | None]:
        """The caller's output buffers in output order (None if none is given), checked to be safe to write into.

        Raises InputError for an unknown name, a wrong dtype, rank or known size, memory that is read-only, not C-contiguous
        or not aligned, or that overlaps an input or another buffer.
        """
        if not isinstance(out, Mapping):
            raise InputError(f"out must map output names to arrays, not {type(out).__name__}")
        if not out.keys() <= self._out.keys():
            unknown = [str(n) for n in out if n not in self._out]
            raise InputError(
                f"there is no output {', '.join(map(repr, unknown))}; the engine gives {show(self.outputs)}"
            )
        others = list(arrays)
        for name, a in out.items():
            self._check_out(self._out[name], a, sizes)
            for other in others:
                if np.may_share_memory(a, other):
                    raise InputError(
                        f"the buffer for output {name!r} overlaps an input or another output buffer",
                        hint="give each its own memory",
                    )
            others.append(a)
        return [out.get(name) for name in self._out]

    def _check_out(self, spec: TensorSpec, a: Any, sizes: Mapping[str, int]) -> None:
        shape = tuple([d if isinstance(d, int) else sizes.get(d, d) for d in spec.shape])
        if isinstance(a, np.ndarray) and a.dtype == spec.dtype and a.flags.carray and a.shape == shape:
            return
        what = f"the buffer for output {spec.name!r}"
        if not isinstance(a, np.ndarray):
            raise InputError(f"{what} is a {type(a).__name__}, not a NumPy array")
        if a.dtype != spec.dtype:
            raise InputError(f"{what} is {_dtype_text(a.dtype)}; the output is {spec}")
        flags = a.flags
        if not flags.writeable:
            raise InputError(f"{what} is read-only")
        if not flags.c_contiguous or not flags.aligned:
            raise InputError(f"{what} is not C-contiguous and aligned", hint="allocate it with np.empty")
        if not agree(shape, a.shape):
            raise InputError(f"{what} has shape {list(a.shape)}; the output is {spec}")

    # ------------------------------------------------------------------ refusals

    def _as_array(self, name: str, value: Any, dtype: DType) -> Array:
        """``value`` as an array of exactly this dtype; arrays of other libraries and plain lists pass if their dtype agrees."""
        if type(value).__module__.startswith("numpy.ma"):
            raise InputError(f"input {name!r} is a masked array", hint="fill it first: x.filled(value)")
        try:
            a = from_dlpack(value) if type(value) is not np.ndarray and offers(value) else np.asarray(value)
        except Exception as e:  # whatever a foreign __array__ or __dlpack__ raises
            raise InputError(f"input {name!r}, a {type(value).__name__}, cannot be read as an array: {e}") from e
        if a.dtype != dtype:
            wanted = dtype_name(dtype)
            literal = f"ml_dtypes.{dtype}" if dtype.kind == "V" else f"np.{dtype.name}"
            hint = f"nothing is cast silently; pass np.asarray(x).astype({literal}) if that is what you mean"
            if a.dtype == np.dtype((np.void, dtype.itemsize)):
                hint = f"NumPy's files keep the bytes of {wanted}, but not the type: pass x.view({literal})"
            raise InputError(f"input {name!r} is {_dtype_text(a.dtype)}; the engine takes {wanted}", hint=hint)
        return a

    def _refuse_names(self, feeds: Any) -> NoReturn:
        takes = f"the engine takes {show(self.inputs)}"
        if not isinstance(feeds, Mapping):
            raise InputError(f"inputs must map names to arrays, not {type(feeds).__name__}; {takes}")
        names = [s.name for s in self.inputs]
        faults = [f"input {n!r} is missing" for n in names if n not in feeds]
        faults += [f"there is no input {str(n)!r}" for n in feeds if n not in names]
        unknown = [str(n) for n in feeds if n not in names]
        missing = [n for n in names if n not in feeds]
        raise InputError(
            f"{', '.join(faults)}; {takes}", hint=next((h for n in unknown if (h := did_you_mean(n, missing))), None)
        )

    def _refuse_sizes(self, sizes: Sizes, origin: Mapping[str, str]) -> NoReturn:
        nearest = max(self.profiles, key=lambda profile: _closeness(sizes, profile))
        faults = [
            f"{n} is {sizes[n]} {origin[n]}, outside of {r.min} to {r.max}"
            for n, r in nearest.items()
            if n in sizes and sizes[n] not in r
        ]
        known = "; ".join(", ".join(f"{n}={_extent(r)}" for n, r in p.items()) for p in self.profiles)
        many = f" (the profiles of the engine are {known})" if len(self.profiles) > 1 else ""
        raise InputError(
            f"the inputs have sizes that the engine was not built for: {', '.join(faults)}{many}",
            hint="build it with a wider --shape range",
        )


def _closeness(sizes: Sizes, profile: Profile) -> tuple[int, int]:
    """How many sizes are in the profile's ranges, and then how close the others are."""
    gaps = [max(r.min - sizes[n], sizes[n] - r.max, 0) for n, r in profile.items() if n in sizes]
    return gaps.count(0), -sum(gaps)


def _extent(sizes: DimRange) -> str:
    """The sizes of a range, without its optimum: 1..32, or 4."""
    return f"{sizes.min}..{sizes.max}" if sizes.min < sizes.max else str(sizes.min)


def bounds_of(plain: Plain) -> dict[str, Bounds]:
    """The bounds in a program's meta: numbers, or texts of symbols. Raises EngineError for anything else."""
    match plain:
        case dict() if all(_are_bounds(row) for row in plain.values()):
            return {str(name): (_bound(row[0]), _bound(row[1]), row[2]) for name, row in plain.items()}
    raise EngineError("the engine's bounds of inputs are malformed")


def _are_bounds(row: Plain) -> bool:
    return isinstance(row, list) and len(row) == 3 and type(row[2]) is str and all(type(x) in (int, str) for x in row)


def _bound(value: int | str) -> DimLike:
    bound = value if isinstance(value, int) else parse_dim(value)
    if bound is None:
        raise EngineError("the engine's bounds of inputs are malformed")
    return bound


def _refuse_shape(spec: TensorSpec, shape: tuple[int, ...], why: str) -> NoReturn:
    raise InputError(f"input {spec.name!r} has shape {list(shape)}; the engine takes {spec} ({why})")


def _inside(profile: Profile, sizes: Sizes) -> bool:
    return all(n not in sizes or r.min <= sizes[n] <= r.max for n, r in profile.items())


def show(specs: Sequence[TensorSpec]) -> str:
    """Specs in one line: ``x: fp32[n, 3, 224, 224], mask: bool[n]``."""
    return ", ".join(map(str, specs)) or "nothing"


def _dtype_text(dtype: np.dtype[Any]) -> str:
    try:
        return dtype_name(dtype)
    except Exception:  # a dtype without a name in optdnn
        return dtype.str if dtype.byteorder in "<>" else str(dtype)
