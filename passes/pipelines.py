"""Which passes run, in which order, and why. One literal list per optimization level."""

from __future__ import annotations

from optdnn.errors import UsageError
from optdnn.passes.added_positions import AddedPositions
from optdnn.passes.appended_rows import AppendedRows
from optdnn.passes.assign_layout import AssignLayout
from optdnn.passes.assign_precision import AssignPrecision
from optdnn.passes.attention_parts import AttentionParts
from optdnn.passes.axis_filters import AxisFilters
from optdnn.passes.bags import Bags
from optdnn.passes.base import Pass
from optdnn.passes.bodies import OptimizeBodies
from optdnn.passes.canonicalize import Canonicalize
from optdnn.passes.canonicalize_arithmetic import CanonicalizeArithmetic
from optdnn.passes.channel_norms import ChannelNorms
from optdnn.passes.channel_shuffles import ChannelShuffles
from optdnn.passes.complex_layers import ComplexLayers
from optdnn.passes.computed_weights import ComputedWeights
from optdnn.passes.constant_parts import ConstantParts
from optdnn.passes.conv3d_to_conv2d import Conv3dAsImages
from optdnn.passes.counted_loops import CountedLoops
from optdnn.passes.counted_masks import CountedMasks
from optdnn.passes.counted_places import CountedPlaces
from optdnn.passes.cse import CommonSubexpressions
from optdnn.passes.dce import DeadCode
from optdnn.passes.depthwise_relu import DepthwiseRelu
from optdnn.passes.deviation_norms import DeviationNorms
from optdnn.passes.divided_loops import DividedLoops
from optdnn.passes.doubled_scans import DoubledScans
from optdnn.passes.dynamic_quantization import DynamicQuantization
from optdnn.passes.einsum_to_matmul import EinsumProducts
from optdnn.passes.equalize import Equalize
from optdnn.passes.expert_loops import ExpertLoops
from optdnn.passes.farthest_points import FarthestPoints
from optdnn.passes.flatten_last import FlattenChannelsLast
from optdnn.passes.fold_constants import FoldConstants
from optdnn.passes.fold_quantized import FoldQuantized
from optdnn.passes.folded_windows import FoldedWindows
from optdnn.passes.fuse_activation import FuseActivation
from optdnn.passes.fuse_attention import FuseAttention
from optdnn.passes.fuse_conv_bn import BnToScaleShift, FuseConvBn, ScaleShiftToBn
from optdnn.passes.fuse_conversions import FuseConversions
from optdnn.passes.fuse_epilogue import FuseEpilogue
from optdnn.passes.fuse_l2_norm import FuseL2Norm
from optdnn.passes.fuse_linear_attention import FuseLinearAttention
from optdnn.passes.fuse_norm import FuseNorm
from optdnn.passes.fuse_pointwise import FusePointwise
from optdnn.passes.fuse_prologue import FusePrologue
from optdnn.passes.fuse_rotary import FuseRotary
from optdnn.passes.fuse_siblings import FuseSiblings
from optdnn.passes.fuse_sinkhorn import FuseSinkhorn
from optdnn.passes.fuse_snake import FuseSnake
from optdnn.passes.fuse_softmax import FuseSoftmax
from optdnn.passes.gather_rows import GatherRows
from optdnn.passes.gathered_products import GatheredProducts
from optdnn.passes.grouped_products import GroupedProducts
from optdnn.passes.guarded_loops import GuardedLoops
from optdnn.passes.half_factors import HalfFactors
from optdnn.passes.hoist_views import HoistViews
from optdnn.passes.image_tokens import ImageTokens
from optdnn.passes.integers import CanonicalizeIntegers, MoveIntegers, ShiftZeroPoints
from optdnn.passes.joined_rows import JoinedRows
from optdnn.passes.joined_tables import JoinedTables
from optdnn.passes.layers_of_parts import LayersOfParts, StepsOfItems
from optdnn.passes.linear_attentions import LinearAttentions
from optdnn.passes.long_scans import LongScans
from optdnn.passes.long_strides import LongStrides
from optdnn.passes.long_top_k import LongTopK
from optdnn.passes.looped_cells import LoopedCells
from optdnn.passes.masked_rows import MaskedRows
from optdnn.passes.mixed_filters import MixedFilters
from optdnn.passes.modulated_weights import ModulatedWeights
from optdnn.passes.one_float import OneFloat
from optdnn.passes.ordered_sums import OrderedSums
from optdnn.passes.pack_weights import PackWeights
from optdnn.passes.pad_channels import PadChannels
from optdnn.passes.pad_heads import PadHeads
from optdnn.passes.pad_rows import PadRows
from optdnn.passes.parallel_loops import ParallelLoops
from optdnn.passes.parallel_scans import ParallelScans
from optdnn.passes.partial_sums import PartialSums
from optdnn.passes.pasted_pictures import PastedPictures
from optdnn.passes.patch_rows import PatchEmbedding
from optdnn.passes.pixel_shuffles import PixelShuffles
from optdnn.passes.plane_transforms import PlaneTransforms
from optdnn.passes.pool_last import PoolLast
from optdnn.passes.product_chains import ProductChains
from optdnn.passes.products_of_parts import ProductsOfParts
from optdnn.passes.radix_sums import RadixSums
from optdnn.passes.relative_positions import RelativePositions
from optdnn.passes.resampling_filters import ResamplingFilters
from optdnn.passes.roll_scans import RollScans
from optdnn.passes.sampled_sums import SampledSums
from optdnn.passes.segment_sums import SegmentSums
from optdnn.passes.selected_weights import SelectedWeights
from optdnn.passes.separable_attention import SeparableAttention
from optdnn.passes.shared_matrices import SharedMatrices
from optdnn.passes.shifted_stacks import ShiftedStacks
from optdnn.passes.short_attention import ShortAttention
from optdnn.passes.sibling_gates import GatesOfSiblings
from optdnn.passes.sibling_sums import SumsOfSiblings
from optdnn.passes.small_products import SmallProducts
from optdnn.passes.spectral_convolutions import SpectralConvolutions
from optdnn.passes.split_products import SplitProducts
from optdnn.passes.stacked_columns import StackedColumns
from optdnn.passes.support.stages import ANCHORS
from optdnn.passes.take_rows import TakeRows
from optdnn.passes.talking_heads import TalkingHeads
from optdnn.passes.token_products import TokenProducts
from optdnn.passes.transform_products import TransformProducts
from optdnn.passes.tree_leaves import TreeLeaves
from optdnn.passes.two_way_attention import TwoWayAttention
from optdnn.passes.unchanged_states import UnchangedStates
from optdnn.passes.unpack_weights import UnpackWeights
from optdnn.passes.unroll import Unroll
from optdnn.passes.unrolled_cells import UnrolledCells
from optdnn.passes.unrolled_scans import UnrolledScans
from optdnn.passes.unshuffled_convolutions import UnshuffledConvolutions
from optdnn.passes.upsampled_convolutions import UpsampledConvolutions
from optdnn.passes.vector_products import VectorProducts
from optdnn.passes.view_chains import ViewChains
from optdnn.passes.weighted_maps import WeightedMaps
from optdnn.passes.wide_products import WideProducts
from optdnn.passes.window_products import WindowProducts
from optdnn.passes.window_sums import WindowSums
from optdnn.target_name import TargetName

CLEAN: tuple[Pass, ...] = (
    DeadCode(),  # first, so that no other pass spends time on dead ops
    FoldConstants(),  # shape arithmetic and all other known values; later passes ask for constants
    PackWeights(),  # packs weights of few bits, which folding leaves alone; before other passes see the products
    OptimizeBodies(),  # folds inside If, Loop and Scan, once the values that they capture are known
)

O0: tuple[Pass, ...] = (
    DeadCode(),  # a target need not support dead ops
)

O1: tuple[Pass, ...] = (
    *CLEAN,
    CommonSubexpressions(),  # before patterns, which then see equal values as one
    CanonicalizeArithmetic(),  # no-ops, reshapes, transposes, padding; constants merged, sums as additions, bounds as Clip
    CommonSubexpressions(),  # merges constants and ops that the rewrites made equal
)

FOLDED: tuple[Pass, ...] = (
    *CLEAN,
    CanonicalizeIntegers(),  # after folding, when quantized weights are constants; gives quantized networks one form
    CommonSubexpressions(keep=ANCHORS),  # before patterns; convolutions stay separate until they are fused
    EinsumProducts(),  # before all passes that look for products of matrices
    Canonicalize(),  # before patterns, which no-ops, padding and transposes between their ops would hide
    CommonSubexpressions(
        keep=ANCHORS
    ),  # again: equal means, one of them written as a sum, stand in one norm (Keras on JAX)
    FuseActivation(),  # before epilogues: x * sigmoid(x) uses x twice, a Swish once
    FuseNorm(),  # before other passes rewrite the arithmetic of a decomposed normalization
    FuseSoftmax(),  # before other passes rewrite the arithmetic of a decomposed softmax
    CanonicalizeArithmetic(),  # before folding and epilogues, which expect merged constants, and sums as additions. It also
    # runs Canonicalize again: a transpose can pass a Swish, but not x * sigmoid(x)
    CanonicalizeIntegers(),  # again: transposes between two roundings to one grid are gone (ONNX Runtime's convolutions of 8 bits)
    FuseConvBn(),  # before epilogues: a scale and shift folded into weights costs nothing
    BnToScaleShift(),  # after folding: the remaining BatchNormalizations can become stages
    CanonicalizeArithmetic(),  # merges a remaining BatchNormalization with the scale and shift after it, and a Pad with its Conv
    FuseConvBn(),  # again: transposes between a BatchNormalization and its products are gone
)
"""The first passes of every target from level 2 on."""

O2: tuple[Pass, ...] = (
    *FOLDED,
    FuseEpilogue(),  # after activations have been recognized: bias, residual, activation
    FusePrologue(),  # after epilogues: a stage is cheaper in the epilogue of the producer
    CommonSubexpressions(),  # merges convolutions that are still equal with all their stages, and constants of rewrites
)

O2_GPU: tuple[Pass, ...] = (
    DeadCode(),  # first, as in CLEAN
    FoldConstants(),  # before loops are unrolled: trip counts and conditions become known
    UnchangedStates(),  # before all other passes on loops, for which constants and sequences are no states
    CountedLoops(),  # before loops are unrolled: a loop that ends by a condition on a counter gets a known trip count
    Bags(),  # before loops are unrolled: any number of bags becomes one reduction
    ParallelScans(),  # before loops are unrolled: independent iterations become one
    OptimizeBodies(),  # before ParallelLoops, which asks for constants in bodies
    ParallelLoops(),  # before loops are unrolled: independent iterations become one
    AppendedRows(),  # before loops are unrolled: states that grow by rows become stacks of known size
    GuardedLoops(),  # before loops are unrolled: a Loop that computed values may end runs a known number of times
    LoopedCells(),  # before DividedLoops, which would take the products of inputs out of the cells
    DividedLoops(),  # before LongScans, for which pointwise operators remain
    LongScans(),  # before loops are unrolled, or left to the host
    Unroll(),  # before all other passes, which then see through loops
    FoldConstants(),  # after unrolling: the number of each iteration is known
    Unroll(),  # again: conditions within an iteration may be known now
    LinearAttentions(),  # before OneFloat, which removes its conversions to fp32, and before all passes on products
    OneFloat(),  # when no loops are left; before all fusions, which conversions would keep apart
    DynamicQuantization(),  # when weights and scales are constants; before passes that look for products or pack weights
    SpectralConvolutions(),  # finds transforms, which the next passes replace
    PlaneTransforms(),  # two transforms together, before each becomes a product
    TransformProducts(),  # before passes that look for products, or merge the views around them
    *FOLDED,
    PastedPictures(),  # when the body of the loop is folded; before PadRows, since its operators have rows
    TreeLeaves(),  # when sums are additions; before fusions, which would take the functions of a tree's result
    ExpertLoops(),  # before MaskedRows, which makes every expert compute all tokens
    MaskedRows(),  # before fusions, which do not know of rows; removes sizes that depend on data
    PadRows(
        ahead=True
    ),  # after MaskedRows: pads the remaining sizes that depend on data, but those that follow from others
    MaskedRows(),  # again: selections among padded rows (R-CNN: detections of the best regions)
    PadRows(),  # again: the sizes that follow from others (R-CNN: masks of detections)
    CountedPlaces(),  # after MaskedRows, which leaves only the number of places; after PadRows, which asks for its bound
    CountedMasks(),  # when Expands that broadcasting replaces are gone; before fusions, which take in the arithmetic of masks
    DoubledScans(),  # before passes on chains of steps; before fusions, which would take in the steps
    LongTopK(),  # after MaskedRows, whose selections are from all scores
    FarthestPoints(),  # after MaskedRows, which makes masked writes of distances selections; before passes on chains of steps
    FuseSinkhorn(),  # when the softmax before it is one operator; before passes on chains of steps
    UnrolledCells(),  # before passes on chains of steps, and on products of their parts
    UnrolledScans(),  # before fusions: chains of steps have many small operators
    GroupedProducts(),  # before ProductsOfParts, which refuses parts with own matrices
    ShiftedStacks(),  # after known positions of writes; before LayersOfParts, which joins views of both images
    StackedColumns(),  # before fusions, which would take the operators of each column
    ComplexLayers(),  # before LayersOfParts, which would join the real layers of a complex one; before epilogues
    LayersOfParts(),  # after UnrolledCells, which takes in the products of steps; before products are stacked along a new axis
    StepsOfItems(),  # after LayersOfParts, which would have moved these operators; before scans are rolled
    ProductsOfParts(),  # before scans are rolled: recurrences whose products leave them are pointwise
    RollScans(),  # after ProductsOfParts: rolls the remaining chains of steps
    GatheredProducts(),  # before sums of segments and epilogues, which take in gathers and sums
    ProductChains(),  # before VectorProducts, whose matrices later products take in; before siblings: its products are siblings
    VectorProducts(),  # before views are hoisted; before siblings, which may take in the matrix
    SampledSums(),  # before precisions: sampling positions stay fp32; before epilogues, which would absorb the weighting
    ConstantParts(),  # before constants are folded, which computes the constant part; before epilogues, which add it
    ResamplingFilters(),  # before epilogues, which hide filters; before views are hoisted
    MixedFilters(),  # before epilogues; after scales and shifts have been folded into the filters
    AxisFilters(),  # before epilogues; before products along tokens
    WindowSums(),  # before epilogues; before channels last are chosen
    FoldedWindows(),  # before epilogues, which sums of segments take in; before the views of windows are hoisted
    SegmentSums(),  # before epilogues, which would take in the arithmetic of rows
    DeviationNorms(),  # before epilogues, which would take in their arithmetic
    FuseL2Norm(),  # before attention: queries and keys of cosine attention; before ChannelNorms. GPUs have a kernel for it
    ChannelNorms(),  # before epilogues, which would absorb their arithmetic; GPUs only: CPU libraries would have to transpose
    FuseRotary(),  # before attention: the rotation of queries and keys
    TalkingHeads(),  # before attention: the ops that it leaves are an attention
    WeightedMaps(),  # before attention, which takes in each softmax of a sum that this pass takes apart
    TwoWayAttention(),  # before attention, which needs scores of its own for each direction
    FuseAttention(),  # before epilogues: scales and masks would become stages. Only GPUs have a kernel for it
    FuseLinearAttention(),  # with attention; before epilogues, which would take in the division
    AttentionParts(),  # after attention; before ShortAttention, since parts may be short; before views are hoisted
    ShortAttention(),  # after attention, before its heads are padded and its views are hoisted
    SharedMatrices(),  # after attention, whose scores of one query have this form; before views are hoisted
    PadHeads(),  # after attention; before views are hoisted and epilogues fused, which hide the projections of heads
    PadChannels(),  # before epilogues are fused and channels are joined, which hide the weights around them
    PixelShuffles(),  # before epilogues, which fix the order of channels
    SelectedWeights(),  # before constants are folded: its stacks of matrices become one; before epilogues
    ModulatedWeights(),  # before ComputedWeights: later passes expect convolutions with constant filters
    ComputedWeights(),  # after ModulatedWeights, for convolutions whose weights are still computed; before epilogues
    TakeRows(),  # after attention, whose queries are rows; before epilogues, and before constants are folded
    FoldConstants(),  # after TakeRows: sums of constant masks and biases, and the rows taken from them
    AddedPositions(),  # after attention; before its views are hoisted, and before epilogues, which add its constants
    RelativePositions(),  # before the views of attention's biases are hoisted and their arithmetic is fused
    UpsampledConvolutions(),  # after ModulatedWeights, whose factors move before the Resize; before epilogues
    UnshuffledConvolutions(),  # before epilogues; before patch embeddings, whose strides it may make
    PoolLast(),  # after the arithmetic around convolutions has been folded into them; before epilogues and siblings
    TokenProducts(),  # before patch embeddings, whose readers it changes, and before views of tokens are moved
    PatchEmbedding(),  # after the arithmetic around convolutions has been folded into them
    ViewChains(),  # before images become tokens, which needs views in one form
    ImageTokens(),  # after patch embeddings; before transposes sink to epilogues, and layouts are chosen
    SeparableAttention(),  # after ImageTokens, which moves the norm before it to its projection; before epilogues
    ChannelShuffles(),  # before epilogues, which would add stages to the halves of the channels
    RadixSums(),  # before epilogues, and before views of images are hoisted
    PartialSums(),  # before epilogues, which take in the additions
    OrderedSums(),  # after PartialSums, which adds additions; before epilogues, which take in additions
    SumsOfSiblings(),  # before epilogues, which take in one convolution of each sum
    HoistViews(),  # before epilogues: views between a product and its residual would keep them separate
    WindowProducts(),  # before the transposes that it adds are merged
    SplitProducts(),  # before epilogues, which then take in the rest of a gated unit
    SmallProducts(),  # after all passes that look for products; before their factors merge with other arithmetic
    CanonicalizeArithmetic(),  # merges transposes of heads that are neighbors now
    FuseConvBn(),  # again: views that are gone stood between products and scales per channel (LayerScale after attention)
    JoinedTables(),  # when no views remain between the rows and their Concat; before passes on gathers
    JoinedRows(),  # before epilogues, which absorb additions to products; before arithmetic is fused
    GatherRows(),  # when no views can be merged any more
    FuseSnake(),  # when the arithmetic has its last form; before epilogues, which take it in
    GatesOfSiblings(),  # after SplitProducts, which takes gated units of two halves apart; before epilogues
    FuseEpilogue(norms_add=True),  # as in O2; leaves some additions to normalizations, whose kernels can add
    LongStrides(),  # after epilogues, which it keeps; before the views of operands are merged
    Conv3dAsImages(),  # after epilogues: it keeps them, but its views would stop them; before the passes for two axes
    FusePrologue(),  # as in O2
    CommonSubexpressions(),  # as in O2; also merges the views of volumes that several convolutions read
)

O2_CPU: tuple[Pass, ...] = (
    FoldConstants(),  # before Bags: the offset of each bag becomes known
    Bags(),  # before all other passes, which then see no loop
    *FOLDED,
    PastedPictures(),  # when the body of the loop is folded
    TreeLeaves(),  # when sums are additions
    ScaleShiftToBn(),  # the libraries have no prologues, but one kernel for a scale and shift per channel (DenseNet: 12 %)
    FuseEpilogue(),  # as in O2: the libraries fuse a chain of single uses after a convolution
    CommonSubexpressions(),  # as in O2
)

LAST: tuple[Pass, ...] = (
    FuseSiblings(),  # after epilogues: siblings are merged together with their biases and activations
    FusePointwise(),  # last: fuses the pointwise work that no other fusion absorbed
)

O3: tuple[Pass, ...] = (*O2, *LAST)
O3_GPU: tuple[Pass, ...] = (*O2_GPU, *LAST)
O3_CPU: tuple[Pass, ...] = (*O2_CPU, *LAST)

ASSIGN: tuple[Pass, ...] = (
    Equalize(),  # exact too, but only useful for integers; on the fused graph, since fused ops are quantized
    AssignPrecision(),  # after all exact rewrites: the one approximation; a fused op is rounded once, at its end
)

ASSIGN_GPU: tuple[Pass, ...] = (
    *ASSIGN,  # before layouts, which weigh bytes
    UnpackWeights(),  # after all folding, when the precision of each product is known
)

GPU: tuple[Pass, ...] = (
    *ASSIGN_GPU,
    HalfFactors(),  # after precisions, which decide on products in tf32; before conversions, which it adds
    ShiftZeroPoints(),  # before integers have readers other than DequantizeLinear; makes padding 0 more often
    MoveIntegers(),  # before FoldQuantized: ops that only move or compare elements run on integers
    FoldQuantized(),  # before layouts: each op on integers becomes one operator, which layouts weigh as one
    DepthwiseRelu(),  # after integers, whose kernels have no prologue; before layouts
    WideProducts(),  # after precisions, which add the conversions; before layouts
    FuseConversions(),  # after WideProducts, which would not see a conversion that is a stage
    AssignLayout(),  # after all passes that rewrite by logical types: it assigns physical layouts
    FlattenChannelsLast(),  # last: it depends on the layouts
)

_LEVELS: dict[str, tuple[tuple[Pass, ...], ...]] = {
    "": tuple((*level, AssignPrecision()) for level in (O0, O1, O2, O3)),  # only for packed weights
    "cpu": ((*O0, *ASSIGN), (*O1, *ASSIGN), (*O2_CPU, *ASSIGN), (*O3_CPU, *ASSIGN)),
    "cuda": ((*O0, *ASSIGN_GPU), (*O1, *ASSIGN_GPU), (*O2_GPU, *GPU), (*O3_GPU, *GPU)),
}
"""Family of the target ("" for all others) -> level -> passes."""


def PIPELINE(level: int, target: str) -> tuple[Pass, ...]:
    """The passes of optimization level 0..3 for a target ("cpu", "reference", "cuda:sm_90a", …), in order.

    Raises UsageError for a level that does not exist.
    """
    levels = _LEVELS.get(TargetName.parse(target).family, _LEVELS[""])
    if not 0 <= level < len(levels):
        raise UsageError(f"opt-level {level} is not one of 0, 1, 2, 3")
    return levels[level]
