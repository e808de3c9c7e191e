"""Further operations of Hopper's products on their rows: norms by given moments, and rotary position embeddings."""

from __future__ import annotations

from dataclasses import dataclass

MOMENT_CHANNELS, MOMENT_ROWS = 64, 8
"""Channels of a row that share moments, and rows that share moments in an image that is normalized as a whole
(``conv_moments.cuh``)."""


@dataclass(frozen=True)
class RowNorm:
    """The norm of the rows that a product reads or adds. Its moments are an operand. It is applied to the sums or to
    the residual."""

    mean: bool
    """Whether the norm subtracts the mean (a layer norm); else it uses only the mean square."""
    epsilon: float
    image: int = 0
    """Rows of an image, which are normalized together by the moments of every eight rows (a group norm of one group);
    0: each row by itself."""


@dataclass(frozen=True)
class HeadTurn:
    """Rotary position embeddings of the first ``channels`` of a result (``conv_turns.cuh``). The channels are heads of
    ``head`` features. The first ``turned`` features of a head form pairs. Positions restart after ``positions``
    rows. The angles of a position are those of ``parts`` heads, which take turns."""

    head: int
    turned: int
    interleaved: bool
    channels: int
    positions: int
    parts: int = 1

    def refuse(self) -> str | None:
        """Why the kernel cannot rotate such heads, or None."""
        if 64 % self.head and self.head % 64:
            return f"heads of {self.head} features and tiles of 64 do not divide one another"
        if self.turned % 16:
            return f"{self.turned} features do not make pairs in vectors of eight"
        if self.turned > 64 and (self.turned % 64 if self.interleaved else self.turned != 128):
            return f"pairs of {self.turned} features lie in different tiles"
        return None

    @property
    def tiles(self) -> int:
        """Tiles of 64 channels that a pair spans."""
        return 2 if self.turned > 64 and not self.interleaved else 1
