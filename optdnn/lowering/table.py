"""The tactics of each kind of operator, the preferred one first."""

from __future__ import annotations

from optdnn.kernels.attention.cached import CachedAttention
from optdnn.kernels.attention.channels import ChannelAttention
from optdnn.kernels.attention.factors import FactoredAttention
from optdnn.kernels.attention.fp32 import Fp32Attention, PartsAttention
from optdnn.kernels.attention.general import GeneralAttention
from optdnn.kernels.attention.hopper import HopperAttention
from optdnn.kernels.attention.linear import LinearAttentionKernel, LinearAttentionSteps
from optdnn.kernels.attention.one_query import OneQueryAttention
from optdnn.kernels.attention.rounded import RoundedAttention
from optdnn.kernels.attention.steps import AttentionSteps
from optdnn.kernels.conv.blocks import BlockConv
from optdnn.kernels.conv.chained import ChainedConv
from optdnn.kernels.conv.depthwise import TiledDepthwise
from optdnn.kernels.conv.depthwise_8bit import Int8Depthwise
from optdnn.kernels.conv.depthwise_paired import PairedDepthwise
from optdnn.kernels.conv.depthwise_transpose import TiledDepthwiseTranspose
from optdnn.kernels.conv.direct import Depthwise, DepthwiseTranspose, DirectConv, DirectConvTranspose
from optdnn.kernels.conv.edges import EdgeDepthwise, EdgeDepthwiseTranspose
from optdnn.kernels.conv.expanded import Expanded
from optdnn.kernels.conv.fp32 import TiledConv, TiledGemm
from optdnn.kernels.conv.general import BandedConv, GeneralConv, GeneralGemm
from optdnn.kernels.conv.grouped import GroupedConv
from optdnn.kernels.conv.hopper import HopperConv
from optdnn.kernels.conv.narrow import NarrowConv
from optdnn.kernels.conv.normed import NormedConv
from optdnn.kernels.conv.paired import PairedConv, PairedParts
from optdnn.kernels.conv.parts import PartsBands, PartsConv, PartsGemm, PartsVolume
from optdnn.kernels.conv.pooled import PooledConv
from optdnn.kernels.conv.separable import Separable
from optdnn.kernels.conv.shuffled import ShuffledConv
from optdnn.kernels.conv.stem import StemConv
from optdnn.kernels.conv.stem_pool import PooledStem
from optdnn.kernels.conv.transpose import (
    GeneralConvTranspose,
    HopperConvTranspose,
    PartsConvTranspose,
    TiledConvTranspose,
)
from optdnn.kernels.conv.unfold import Unfold
from optdnn.kernels.conv.volume import VolumeConv
from optdnn.kernels.conv.volume_stem import VolumeStem
from optdnn.kernels.gemm.chained import ChainedGemm
from optdnn.kernels.gemm.gated import GatedGemm
from optdnn.kernels.gemm.gemv import Gemv
from optdnn.kernels.gemm.gemv_pair import GemvPair, GemvPairRows
from optdnn.kernels.gemm.hopper import HopperGemm
from optdnn.kernels.gemm.hopper_matmul import HopperMatMul
from optdnn.kernels.gemm.matmul import TiledMatMul
from optdnn.kernels.gemm.normed import NormedGemm, NormedPair
from optdnn.kernels.gemm.normed_residual import NormedResidualGemm
from optdnn.kernels.gemm.paired import PairedGemm, PairedPartsGemm
from optdnn.kernels.gemm.row_product import RowProduct
from optdnn.kernels.gemm.selected import SelectedGemv, SelectedHopper, SelectedTiles
from optdnn.kernels.gemm.turned import NormedTurnedGemm, TurnedGemm
from optdnn.kernels.index import numeric, positions, regions, scatters, sinkhorn, trees, votes
from optdnn.kernels.index.farthest import FarthestKernel
from optdnn.kernels.index.resized_peaks import ResizedPeak
from optdnn.kernels.index.roi_align import RoiChannels, RoiPixels
from optdnn.kernels.index.rotary import Rotary, RotaryPair
from optdnn.kernels.index.rotary_norm import RotaryNormPair
from optdnn.kernels.index.sample import Sample
from optdnn.kernels.index.sampling import SampledChannels, SampledPixels
from optdnn.kernels.index.top_rows import TopRows
from optdnn.kernels.layout.gather import GatherBy, GatherView, Pad, Resize
from optdnn.kernels.layout.picture import ResizedPicture
from optdnn.kernels.layout.pointwise_rows import PointwiseRows
from optdnn.kernels.layout.staged_pad import StagedPad
from optdnn.kernels.libraries.collective import Collect
from optdnn.kernels.libraries.cudnn_attention import CudnnAttention
from optdnn.kernels.libraries.tactics import CublasLtBatched, CublasLtGemm, CudnnConv, CudnnNorm
from optdnn.kernels.norm.across import AddNormAcross, NormAcross, NormOfAcross
from optdnn.kernels.norm.add_group_norm import AddGroupNorm
from optdnn.kernels.norm.add_norm import AddNorm, AddNormNarrowed, AddNormQuantized
from optdnn.kernels.norm.channel_norms import BatchNorm, LocalResponse
from optdnn.kernels.norm.dequantized_rows import DequantizedRows
from optdnn.kernels.norm.group_norm import GroupNorm
from optdnn.kernels.norm.group_norm_add import GroupNormAdd
from optdnn.kernels.norm.modulated import ModulatedRows
from optdnn.kernels.norm.modulated_groups import ModulatedGroupNorm
from optdnn.kernels.norm.norm_add import NormAdd
from optdnn.kernels.norm.norm_add_norm import NormAddNorm
from optdnn.kernels.norm.norm_norm import NormNorm, NormNormNarrowed
from optdnn.kernels.norm.row_tiles import RowTiles
from optdnn.kernels.norm.rows import Rows, WidenedRows
from optdnn.kernels.norm.rows_grid import RowsGrid
from optdnn.kernels.norm.rows_once import OPERATIONS, ActivatedRows, FlatRows, NarrowedRows, QuantizedRows, RowsOnce
from optdnn.kernels.norm.short_rows import ShortRows, ShortRowsPair
from optdnn.kernels.norm.softmax_mean import SoftmaxMean
from optdnn.kernels.packed.eight_bits import PackedBytes
from optdnn.kernels.packed.gemm import PackedGemm
from optdnn.kernels.packed.row_product import PackedResidentPair, PackedRowProduct
from optdnn.kernels.packed.tactics import PackedDigits, PackedGemv, PackedMma, PackedResident, PackedWgmma
from optdnn.kernels.pointwise.custom import Custom
from optdnn.kernels.pointwise.elementwise import Elementwise
from optdnn.kernels.pool.max_pool import TiledMaxPool
from optdnn.kernels.pool.pool import StagedPool, WindowPool
from optdnn.kernels.quantized.chained import ChainedQuantized
from optdnn.kernels.quantized.dynamic_range import DynamicRange
from optdnn.kernels.quantized.dynamic_rounding import DynamicRounding
from optdnn.kernels.quantized.general import BandedQuantizedConv, GeneralQuantizedConv, GeneralQuantizedMatMul
from optdnn.kernels.quantized.hopper import HopperQuantizedConv, HopperQuantizedMatMul
from optdnn.kernels.quantized.pools import Int8MaxPool, Int8Mean
from optdnn.kernels.recurrent.general import GeneralRNN
from optdnn.kernels.recurrent.grid import GridRNN
from optdnn.kernels.recurrent.hopper import HopperRNN
from optdnn.kernels.recurrent.pointwise_scan import PointwiseScanKernel
from optdnn.kernels.recurrent.resident import ResidentRNN
from optdnn.kernels.reduce.arg import ArgBlock, ArgExtreme
from optdnn.kernels.reduce.means import KINDS as IMAGE_SUMS
from optdnn.kernels.reduce.means import ImageMeans, QuantizedMeans
from optdnn.kernels.reduce.parts import ReductionParts
from optdnn.kernels.reduce.reduce import REDUCTIONS, Reduction
from optdnn.kernels.reduce.segment_sum import SegmentSumKernel
from optdnn.kernels.reduce.staged import StagedReduction
from optdnn.kernels.tactic import Tactic
from optdnn.ops.collective import COLLECTIVES
from optdnn.ops.table import OPDEFS

_PRODUCTS: tuple[Tactic, ...] = (
    RoundedAttention(),
    SoftmaxMean(),
    RowProduct(),
    Gemv(),
    ChainedGemm(),
    GemvPairRows(),
    NormedPair(),
    PairedGemm(),
    NormedTurnedGemm(),
    TurnedGemm(),
    NormedGemm(),
    NormedResidualGemm(),
    GatedGemm(),
    HopperGemm(),
    GeneralGemm(),
    PairedPartsGemm(),
    PartsGemm(),
    TiledGemm(),
)
_LATER_PRODUCTS: tuple[Tactic, ...] = (TiledMatMul(), CublasLtGemm(), CublasLtBatched())
_NORMS: tuple[Tactic, ...] = (
    DequantizedRows(), QuantizedRows(), NarrowedRows(), NormNormNarrowed(), NormNorm(), NormAcross(), NormOfAcross(), ActivatedRows(), RowsOnce(),
)  # fmt: skip
_LATER_NORMS: tuple[Tactic, ...] = (ShortRowsPair(), ShortRows(), RowsGrid(), Rows())

_OWN: dict[str, tuple[Tactic, ...]] = {
    "Conv": (
        PooledConv(),
        ShuffledConv(),
        ChainedConv(),
        Separable(),
        Expanded(),
        GemvPair(),
        BlockConv(),
        VolumeStem(),
        PooledStem(),
        StemConv(),
        VolumeConv(),
        NormedConv(),
        PairedConv(),
        NarrowConv(),
        HopperConv(),
        EdgeDepthwise(),
        PairedDepthwise(),
        TiledDepthwise(),
        Depthwise(),
        GroupedConv(),
        BandedConv(),
        GeneralConv(),
        PairedParts(),
        PartsVolume(),
        PartsConv(),
        PartsBands(),
        TiledConv(),
        DirectConv(),
        CudnnConv(),
    ),
    "Custom": (Custom(),),
    "ConvTranspose": (
        HopperConvTranspose(),
        GeneralConvTranspose(),
        PartsConvTranspose(),
        TiledConvTranspose(),
        EdgeDepthwiseTranspose(),
        TiledDepthwiseTranspose(),
        DepthwiseTranspose(),
        DirectConvTranspose(),
    ),
    "MatMul": (*_PRODUCTS, SelectedGemv(), SelectedHopper(), SelectedTiles(), HopperMatMul(), *_LATER_PRODUCTS),
    "Gemm": (*_PRODUCTS, *_LATER_PRODUCTS),
    "PackedMatMul": (
        PackedRowProduct(),
        PackedDigits(),
        PackedGemv(),
        PackedMma(),
        PackedResidentPair(),
        PackedResident(),
        PackedBytes(),
        PackedWgmma(),
        PackedGemm(),
    ),
    "QuantizedConv": (
        ChainedQuantized(),
        HopperQuantizedConv(),
        Int8Depthwise(),
        BandedQuantizedConv(),
        GeneralQuantizedConv(),
    ),
    "QuantizedMatMul": (HopperQuantizedMatMul(), GeneralQuantizedMatMul()),
    "QuantizedMean": (Int8Mean(),),
    "DynamicRange": (DynamicRange(),),
    "MaxPool": (Int8MaxPool(), TiledMaxPool(), ReductionParts(), Reduction(), WindowPool()),
    "AveragePool": (ReductionParts(), Reduction(), WindowPool()),
    "Resize": (Resize(),),
    "Pad": (StagedPad(), Pad()),
    "BatchNormalization": (BatchNorm(),),
    "LRN": (LocalResponse(),),
    **dict.fromkeys(("ArgMax", "ArgMin"), (ArgBlock(), ArgExtreme())),
    "RNN": (ResidentRNN(), GridRNN(), GeneralRNN()),
    "GRU": (ResidentRNN(), HopperRNN(), GridRNN(), GeneralRNN()),
    "LSTM": (ResidentRNN(), HopperRNN(), GridRNN(), GeneralRNN()),
    "PointwiseScan": (PointwiseScanKernel(),),
    "SegmentSum": (SegmentSumKernel(),),
    "SampledSum": (SampledChannels(), SampledPixels()),
    "GridSample": (SampledChannels(),),
    "ResizedPeaks": (ResizedPeak(),),
    "RoiAlign": (RoiChannels(), RoiPixels()),
    "Attention": (
        CachedAttention(),
        OneQueryAttention(),
        ChannelAttention(),
        FactoredAttention(),
        HopperAttention(),
        GeneralAttention(),
        PartsAttention(),
        Fp32Attention(),
        AttentionSteps(),
        CudnnAttention(),
    ),
    "NormalizedLinearAttention": (LinearAttentionKernel(), LinearAttentionSteps()),
    "RotaryEmbedding": (RotaryNormPair(), RotaryPair(), Rotary()),
    "SampleToken": (Sample(),),
    **dict.fromkeys(COLLECTIVES, (Collect(),)),
    "Gather": (GatherView(), GatherBy()),
    **dict.fromkeys(("GatherElements", "GatherND"), (GatherBy(),)),
    **dict.fromkeys(
        OPERATIONS, (QuantizedRows(), NarrowedRows(), ActivatedRows(), RowsOnce(), WidenedRows(), RowsGrid(), Rows())
    ),
    "LayerNormalization": (*_NORMS, FlatRows(), RowTiles(), *_LATER_NORMS, CudnnNorm()),
    "RMSNormalization": (*_NORMS, *_LATER_NORMS, CudnnNorm()),
    **dict.fromkeys(("InstanceNormalization", "GroupNormalization"), (GroupNorm(), RowTiles(), RowsGrid(), Rows())),
    "DeviationNormalization": (RowsOnce(), Rows()),
    "LpNormalization": (ShortRowsPair(), ActivatedRows(), ShortRows(), RowsOnce(), RowsGrid(), Rows()),
    "MeanVarianceNormalization": (RowsGrid(), Rows()),
    "LpPool": (WindowPool(),),
    **dict.fromkeys(positions.POSITIONS, (positions.TACTIC,)),
    **dict.fromkeys(scatters.SCATTERS, (scatters.TACTIC,)),
    "FarthestPoints": (FarthestKernel(),),
    "Sinkhorn": (sinkhorn.TACTIC,),
    "SVMDecision": (votes.TACTIC,),
    "TreeEnsemble": (trees.TACTIC,),
    "TopK": (TopRows(), positions.TACTIC),
    **dict.fromkeys(REDUCTIONS, (StagedReduction(), ReductionParts(), Reduction())),
    **dict.fromkeys(
        (*IMAGE_SUMS, "GlobalAveragePool"),
        (StagedReduction(), QuantizedMeans(), ImageMeans(), ReductionParts(), Reduction()),
    ),
    "GlobalMaxPool": (StagedReduction(), ReductionParts(), Reduction()),
    **{
        kind: (StagedPool(), PointwiseRows(), Elementwise())
        for kind, d in OPDEFS.items()
        if d.traits.pointwise and kind != "Identity"
    },
    "Cast": (ResizedPicture(), StagedPool(), Elementwise()),
    "Add": (
        NormAddNorm(),
        AddNormQuantized(),
        AddNormNarrowed(),
        AddNorm(),
        AddNormAcross(),
        AddGroupNorm(),
        NormAdd(),
        GroupNormAdd(),
        StagedPool(),
        PointwiseRows(),
        Elementwise(),
    ),
    "Pointwise": (
        GroupNormAdd(),
        ModulatedGroupNorm(),
        ModulatedRows(),
        StagedPool(),
        PointwiseRows(),
        DynamicRounding(),
        Elementwise(),
    ),
    "Concat": (Unfold(),),
}

_LAST: dict[str, Tactic] = {
    **dict.fromkeys(numeric.NUMERIC, numeric.TACTIC),
    **dict.fromkeys(regions.REGIONS, regions.TACTIC),
}
"""General tactics, for operators that no other tactic takes."""

TACTICS: dict[str, tuple[Tactic, ...]] = _OWN | {kind: (*_OWN.get(kind, ()), one) for kind, one in _LAST.items()}
"""Kind -> its tactics in order of preference. Kinds of :data:`optdnn.kernels.layout.views.VIEWS` need none."""

WRITES_ANYWHERE = frozenset(TACTICS) - {"Concat", "Gather", "LSTM", "GRU", "RNN"}
"""Kinds whose kernels write to a reserved place of any strides. The excluded ones would need a copy: a Gather may be a view, and a
recurrent layer's states are contiguous."""
