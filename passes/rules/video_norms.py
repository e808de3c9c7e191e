"""Norms of the channels of several images together: the images of one video are one image with more positions.

Temporal layers of video networks (AnimateDiff: Guo et al., 2023) split the images of a video from the batch, and put channels in
front of them, (B, C, T, H, W), since that is where a GroupNormalization expects them. Then they put the channels last, as rows for
attention over the T images. A norm does not depend on the order of positions. So the rows of all images are normalized as they are.
"""

from __future__ import annotations

from typing import Any

from optdnn.ir.graph import Graph, Op, Value
from optdnn.ir.patch import Patch
from optdnn.ops.shape import TransposeAttrs
from optdnn.passes.base import Match, Miss
from optdnn.passes.support.facts import RESHAPES, channels_to_last, reshape_target, reshaped, shape_of
from optdnn.passes.support.image_views import INEXPRESSIBLE, NORMS, is_image
from optdnn.passes.support.pattern import Var, node
from optdnn.passes.support.pattern_rule import pattern_rule
from optdnn.passes.support.views import transposed
from optdnn.types import product

_VIDEO = node("Transpose", node(RESHAPES, Var("images"), name="split"), name="turn", alone=True)


@pattern_rule("video_norm", node("Transpose", node(NORMS, _VIDEO, Var("scale"), Var("bias"), name="norm", alone=True)))
def video_norm(graph: Graph, root: Op, found: dict[str, Any]) -> Match | Miss | None:
    """A norm of (B, C, T, …) between a Reshape of images (B * T, C, …) and a Transpose that puts C last."""
    images, norm, turn, perm = found["images"], found["norm"], found["turn"].attrs.perm, root.attrs.perm
    before, split = shape_of(graph, images), found["split"].outputs[0].type.shape
    if before is None or split is None or len(split) < 4 or len(before) != len(split) - 1 or before[1:] != split[2:]:
        return None
    if turn != (0, 2, 1, *range(3, len(split))) or perm is None or perm[-1] != 1 or not is_image(graph, images):
        return None
    rows = (split[0], split[1], *split[3:], split[2])  # B, T, positions, C
    apart = reshape_target((before[0], *before[2:], before[1]), rows)
    joined = (*split[:1], product(rows[1:-1]), split[2])
    together = reshape_target(rows, joined)
    back = reshape_target(joined, rows)
    if apart is None or together is None or back is None:
        return INEXPRESSIBLE
    axes = (0, len(split) - 1, 1, *range(2, len(split) - 1))  # of the norm's result (B, C, T, positions), in the rows
    order = tuple(axes[p] for p in perm)

    def build(patch: Patch) -> Value:
        pixels = patch.add("Transpose", [images], TransposeAttrs(channels_to_last(len(before))))
        y = patch.add(
            "Transpose", [reshaped(patch, reshaped(patch, pixels, apart), together)], TransposeAttrs((0, 2, 1))
        )
        y = patch.add(norm.kind, [y, *norm.inputs[1:]], norm.attrs)
        y = patch.add("Transpose", [y], TransposeAttrs((0, 2, 1)))
        return transposed(patch, reshaped(patch, y, back), order)

    return Match((root, norm, found["turn"]), build)
