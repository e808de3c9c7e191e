"""Names of the inputs and the output of engines that sample: a build adds them, and a generator looks for them."""

from __future__ import annotations

PREFIX = "sample."
"""The prefix of the inputs that sampling adds, as in ``sample.temperature``."""
SETTINGS = ("temperature", "top_k", "top_p", "seed", "position")
"""The settings, one value per sequence."""
ROW = f"{PREFIX}row"
"""The row of each sequence that holds the logits to sample from."""
TYPICAL = {ROW: 0, **{f"{PREFIX}{name}": 0 for name in SETTINGS}, f"{PREFIX}top_p": 1}
"""Values of these inputs that fit every size: the most probable token of row 0."""
TOKEN = "next_token"
"""The output: the next token of each sequence, [batch, 1]."""
