"""Arithmetic in the names of dimensions, and ranges of sizes on the command line."""

from __future__ import annotations

from random import Random

from fuzz.judge import ours
from fuzz.trees import INTEGERS, mutated_bytes
from optdnn.dim import bounds
from optdnn.dim_text import parse_dim
from optdnn.ranges import parse_shapes

COVERED = ("optdnn.dim", "optdnn.dim_text", "optdnn.ranges")
WORDS = b"+ - * / % ( ) , ** // floor( ceil( min( max( mod( n m k.0 1 2 .. x =".split()


def seeds() -> list[bytes]:
    sums = ("past_sequence_length + 1", "2*s0", "floor(s/2)", "max(n, 3) - min(m, n)", "mod(n, 8)", "(a+b)**3")
    return [text.encode() for text in (*sums, "x=1..4..16x1x8x8")]


def mutate(data: bytes, rng: Random) -> bytes:
    if rng.random() < 0.2:
        return mutated_bytes(data, rng)
    at, word = rng.randrange(len(data) + 1), rng.choice((*WORDS, str(rng.choice(INTEGERS)).encode()))
    return data[:at] + word + data[at + rng.choice((0, 0, 1, 3)) :]


def one_input(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    with ours():
        found = parse_dim(text)
        if found is not None:
            bounds(found)
            parse_dim(str(found))
    with ours():
        parse_shapes([text])
