"""Names of the inputs and the output of engines that sample: what a build adds, and a generator looks for."""

from __future__ import annotations

PREFIX = "sample."
"""The prefix of the inputs that sampling adds, as in ``sample.temperature``."""
SETTINGS = ("temperature", "top_k", "top_p", "seed", "position")
"""The settings, one number for each sequence."""
ROW = f"{PREFIX}row"
"""The row of each sequence whose logits count."""
TOKEN = "next_token"
"""The output: the next token of each sequence, [batch, 1]."""
