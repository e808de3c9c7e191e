"""One form for equal graphs: no-ops disappear, reshapes and transposes merge, convolutions and pools absorb padding.

This pass leaves arithmetic alone, so that decomposed activations and normalizations can be recognized after it;
``canonicalize_arithmetic`` runs after these.
"""

from __future__ import annotations

from optdnn.passes.base import RulePass
from optdnn.passes.rules.added_parts import added_part, concat_of_parts, pad_of_pad, part_of_pad, part_of_zeros
from optdnn.passes.rules.concats import (
    concat_of_split,
    empty_parts,
    interleaved_parts,
    merged_stack,
    part_of_concat,
    split_of_concat,
    stack_of_split,
    turned_parts,
)
from optdnn.passes.rules.cropped_convs import crop_conv, crop_transpose, pixel_of_conv
from optdnn.passes.rules.grids import grid_fold, grid_gather, grid_gather_nd, neighboring_rows, repeated_pixels
from optdnn.passes.rules.input_sizes import input_target
from optdnn.passes.rules.known_pads import known_pads
from optdnn.passes.rules.known_writes import assembled_writes, hidden_write, known_writes
from optdnn.passes.rules.means import (
    reduction_of_joined_axes,
    reduction_of_reduction,
    sum_is_mean,
    variance_of_joined_axes,
)
from optdnn.passes.rules.noop import known_choice, no_op, norm_of_one, unused_indices
from optdnn.passes.rules.repeated_items import repeated_items, repeated_operand
from optdnn.passes.rules.rows_of_gemm import rows_of_gemm
from optdnn.passes.rules.scale import gemm_addend
from optdnn.passes.rules.segment_tables import segment_table
from optdnn.passes.rules.select import known_compress, select_is_where
from optdnn.passes.rules.selected_parts import element_of_stack, tile_is_expand
from optdnn.passes.rules.shape import (
    constant_target,
    equal_elements,
    kept_axes,
    redundant_expand,
    reshape_chain,
    reshapes_around,
    transpose_chain,
    transpose_is_reshape,
    whole_axes,
)
from optdnn.passes.rules.shared_transposes import shared_transpose
from optdnn.passes.rules.transpose import sink_transpose
from optdnn.passes.rules.unit_axes import unit_axis, unit_windows
from optdnn.passes.rules.window import drop_taps, pad_conv, pad_pool


class Canonicalize(RulePass):
    name = "canonicalize"
    rules = (
        no_op,
        known_choice,
        unused_indices,
        norm_of_one,
        known_pads,  # before the rules of windows, which read pads
        constant_target,  # before chains: a target that is constant is one less to refuse
        reshape_chain,
        reshapes_around,
        input_target,  # after chains: an outer Reshape may spare the inner one its target
        kept_axes,
        tile_is_expand,
        equal_elements,
        repeated_operand,
        repeated_items,
        redundant_expand,  # after targets are constant, so that sizes are known
        whole_axes,
        grid_gather,
        grid_gather_nd,
        neighboring_rows,  # after gathers of whole axes
        repeated_pixels,
        grid_fold,
        transpose_chain,  # before sinking: two neighbors merge where they are
        transpose_is_reshape,
        unit_axis,  # before sinking, and before padding is absorbed: the views are still next to the convolution
        unit_windows,
        empty_parts,
        merged_stack,
        concat_of_split,
        stack_of_split,
        turned_parts,
        concat_of_parts,
        added_part,  # after parts that are put together unchanged
        pad_of_pad,
        part_of_pad,
        part_of_zeros,  # after Pads are merged
        part_of_concat,
        split_of_concat,
        element_of_stack,
        interleaved_parts,
        hidden_write,  # before other writes become Concats
        assembled_writes,
        known_writes,  # before sinking: the Transposes around a write are still next to it
        gemm_addend,  # before formulas of activations, which read the product twice
        segment_table,
        rows_of_gemm,  # before sinking: a Transpose before it can pass the product
        sink_transpose,
        shared_transpose,  # after sinking, which moves transposes the other way
        select_is_where,
        known_compress,
        variance_of_joined_axes,  # before the means that it reads
        reduction_of_joined_axes,
        reduction_of_reduction,
        sum_is_mean,  # norms are recognized by their means
        pad_conv,
        crop_conv,
        pixel_of_conv,
        crop_transpose,
        drop_taps,  # after the padding of its own and of a Pad are one
        pad_pool,
    )
