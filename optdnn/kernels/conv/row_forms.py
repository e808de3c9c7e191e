"""What else Hopper's products do with their rows: norms by given moments, and rotary position embeddings."""

from __future__ import annotations

from dataclasses import dataclass

MOMENT_CHANNELS, MOMENT_ROWS = 64, 8
"""Channels of a row that have moments together, and rows of an image that is normalized as a whole (``conv_moments.cuh``)."""


@dataclass(frozen=True)
class RowNorm:
    """The norm of the rows that a product reads or adds. Their moments are given, and it is applied to the sums or to the residual."""

    mean: bool
    """Whether the mean is taken away (a layer norm); else only the mean square counts."""
    epsilon: float
    image: int = 0
    """Rows of an image, which are normalized together by the moments of eights of them (a group norm of one group); 0: each by itself."""


@dataclass(frozen=True)
class HeadTurn:
    """Rotary position embeddings of the first ``channels`` of a result (``conv_turns.cuh``). They are heads of ``head`` features, and the
    first ``turned`` features make pairs. Positions begin anew after ``positions`` rows."""

    head: int
    turned: int
    interleaved: bool
    channels: int
    positions: int

    def refuse(self) -> str | None:
        """Why the kernel cannot turn such heads, or None."""
        if 64 % self.head and self.head % 64:
            return f"heads of {self.head} features and tiles of 64 do not divide one another"
        if self.turned % 16:
            return f"{self.turned} features do not make pairs in vectors of eight"
        if self.turned > 64 and (self.turned % 64 if self.interleaved else self.turned != 128):
            return f"pairs of {self.turned} features lie in different tiles"
        return None

    @property
    def tiles(self) -> int:
        """Tiles of 64 channels in which a pair lies."""
        return 2 if self.turned > 64 and not self.interleaved else 1
