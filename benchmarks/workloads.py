"""Workloads: networks and their settings, batches, precisions and groups.

The table is ``workloads.toml``, which also describes its format.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optdnn.errors import UsageError

FORM = re.compile(
    r"(?P<network>[\w.-]+/[\w.-]+)(?::(?P<batches>\d+(?:,\d+)*))?(?P<settings>(?::\w+=\d+)*)(?:@(?P<precision>[\w+]+))?"
)
TABLE: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
GROUPS: Mapping[str, Sequence[str]] = TABLE["groups"]
REACH: Mapping[str, float] = TABLE["reach"]
"""Workload -> the milliseconds to reach on an H200."""
EXPLAINED: Mapping[str, str] = TABLE["explained"]
"""Workload -> why it is not faster, in Markdown."""


@dataclass(frozen=True)
class Workload:
    """A network at a batch size and a precision. ``settings`` are integers: options of the zoo's builder; for PyTorch's networks
    the height and width of pictures, ``size``, or ``img_size`` if a network of timm must know it."""

    network: str
    batch: int = 1
    precision: str = "fp16"
    settings: tuple[tuple[str, int], ...] = ()

    @property
    def source(self) -> str:
        return self.network.partition("/")[0]

    @property
    def made(self) -> Network:
        """The way to make the network."""
        return NETWORKS.get(self.network, Network())

    @property
    def short(self) -> str:
        """The network without its source."""
        return self.network.partition("/")[2]

    @property
    def model(self) -> str:
        """The workload without its precision."""
        return f"{self.network}:{self.batch}" + "".join(f":{k}={v}" for k, v in self.settings)

    @property
    def name(self) -> str:
        return f"{self.model}@{self.precision}"

    @property
    def side(self) -> int | None:
        """Height and width of pictures; None: those of the network."""
        found = dict(self.settings)
        return found.get("size", found.get("img_size"))

    @property
    def file(self) -> str:
        """The name in a form for file names."""
        return re.sub(r"[^\w.]+", "-", self.name)

    @property
    def label(self) -> str:
        """The name for tables of figures: network, batch, settings, and the precision if it is not fp16."""
        shown = [self.short, str(self.batch), *(str(v) for _, v in self.settings)]
        return ", ".join([*shown, *([] if self.precision == "fp16" else [self.precision])])


def parse(text: str) -> list[Workload]:
    """The workloads of a line without braces, a batch each. Raises UsageError for another form."""
    found = FORM.fullmatch(text)
    if found is None:
        hint = "write SOURCE/NETWORK:BATCH@PRECISION, such as zoo/resnet50:8@fp16"
        raise UsageError(f"{text!r} is no workload", hint=hint)
    settings = tuple((k, int(v)) for k, _, v in (part.partition("=") for part in found["settings"].split(":") if part))
    precision = found["precision"] or "fp16"
    return [Workload(found["network"], int(n), precision, settings) for n in (found["batches"] or "1").split(",")]


@dataclass(frozen=True)
class Network:
    """The settings of a source for a network, if its defaults are not suitable: the fields of ``workloads.toml``."""

    make: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Sequence[Sequence[Any]] = ()
    call: Mapping[str, Any] = field(default_factory=dict)
    weights: Sequence[Sequence[int]] = ()
    constants: Mapping[str, Sequence[float]] = field(default_factory=dict)


NETWORKS: dict[str, Network] = {name: Network(**fields) for name, fields in TABLE["networks"].items()}
"""Network -> how it is made."""


def spread(text: str) -> list[str]:
    """The lines into which a line with braces expands."""
    found = re.search(r"\{([^{}]*)\}", text)
    if found is None:
        return [text]
    return [line for part in found[1].split(",") for line in spread(text[: found.start()] + part + text[found.end() :])]


def group(name: str, shared: Sequence[str] = ()) -> list[Workload]:
    """The workloads of a group. ``shared``: the networks for a ``*``. Raises UsageError for an unknown group."""
    if name not in GROUPS:
        raise UsageError(f"there is no group {name!r} of workloads", hint=f"take one of {', '.join(GROUPS)}")
    found: list[Workload] = []
    for line in GROUPS[name]:
        if "/" not in line:
            found += group(line, shared)
        for text in spread(line) if "/" in line else ():
            found += [w for n in (shared if "*" in text else [""]) for w in parse(text.replace("*", n))]
    return list(dict.fromkeys(found))


def chosen(words: Iterable[str], groups: Sequence[str], only: str = "", shared: Sequence[str] = ()) -> list[Workload]:
    """Workloads by name, else those of groups whose name contains a part of ``only`` (parts are separated by commas)."""
    named = [w for text in words for line in spread(text) for w in parse(line)]
    every = named or [w for name in groups for w in group(name, shared)]
    return [w for w in dict.fromkeys(every) if any(part in w.name for part in only.split(","))]
