"""The limits on input from files and requests that may be hostile, in one place.

A small file can cause long work or need much memory. Each limit bounds one such demand. Its error names the limit and how to raise
it: by an environment variable, ``OPTDNN_MAX_NODES=500000`` for :data:`NODES`. ``docs/reference/limits.md`` lists them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from optdnn.errors import UsageError

PREFIX = "OPTDNN_MAX_"


@dataclass(frozen=True)
class Limit:
    """One limit: its name, its default, and what it counts."""

    name: str
    default: int
    meaning: str
    source: str = "the file"
    """The source of the demand."""

    @property
    def variable(self) -> str:
        """The environment variable that replaces the default."""
        return PREFIX + self.name.upper()

    @property
    def value(self) -> int:
        """The limit in this process. Raises UsageError if its variable is not a whole number."""
        text = os.environ.get(self.variable)
        if text is None:
            return self.default
        if not (text.isascii() and text.isdigit() and len(text) < 20):
            raise UsageError(f"{self.variable} must be a whole number, not {text!r:.60}")
        return int(text)

    @property
    def hint(self) -> str:
        """The hint of an error about this limit."""
        return f"the limit is {self.value} {self.meaning}; if you trust {self.source}, raise it: {self.variable}=N"


NODES = Limit("nodes", 200_000, "nodes of a model, with the bodies of its operators")
INLINED_NODES = Limit("inlined_nodes", 30_000, "nodes that a model's functions and subgraphs become")
FUNCTION_NESTING = Limit("function_nesting", 64, "functions that call one another in a chain")
SUBGRAPH_NESTING = Limit("subgraph_nesting", 16, "subgraphs inside of one another")
HEADER_NESTING = Limit("header_nesting", 200, "lists and tables inside of one another in an engine's header")
HEADER_BYTES = Limit("header_bytes", 64 << 20, "bytes of an engine's header")
TENSOR_BYTES = Limit("tensor_bytes", 1 << 40, "bytes of one tensor")
SPARSE_BYTES = Limit("sparse_bytes", 1 << 28, "bytes of a sparse tensor made dense")
DIM_PARTS = Limit("dim_parts", 1024, "symbols, functions and terms of one symbolic size")
FOLDED_BYTES = Limit("folded_bytes", 1 << 31, "bytes that constant folding adds to a model")
FOLDED_WORK = Limit("folded_work", 2_000_000_000, "operations of constant folding beyond a few for each weight")
LOOP_TRIPS = Limit("loop_trips", 1_000_000, "iterations of a Loop, including the loops inside of it")
WINDOW = Limit("window", 1 << 20, "places in the window of a pool")
CACHE_BYTES = Limit("cache_bytes", 1 << 28, "bytes of a cache or another JSON file")
UNPACKED_BYTES = Limit("unpacked_bytes", 1 << 32, "bytes of an array in a compressed archive")
PICTURE_PIXELS = Limit("picture_pixels", 1 << 27, "pixels of a picture")
REQUEST_BYTES = Limit("request_bytes", 1 << 28, "bytes of a request to a server", "the clients")
REQUEST_JSON_BYTES = Limit(
    "request_json_bytes",
    1 << 25,
    "bytes of JSON, or of a gRPC message without its raw tensors, in a request to a server",
    "the clients",
)

LIMITS = tuple(value for value in tuple(globals().values()) if isinstance(value, Limit))
"""All limits, as the reference lists them."""
