"""Which tactics run which kinds of operator, the preferred one first."""

from __future__ import annotations

from optdnn.ops.table import OPDEFS
from optdnn.tactics.cuda.add_norm import AddNorm, PlainAdd
from optdnn.tactics.cuda.arg import ArgExtreme
from optdnn.tactics.cuda.attention import AttentionSteps, HopperAttention
from optdnn.tactics.cuda.attention_sm80 import GeneralAttention
from optdnn.tactics.cuda.conv import HopperConv
from optdnn.tactics.cuda.conv_bands import BandedConv
from optdnn.tactics.cuda.conv_blocks import BlockConv
from optdnn.tactics.cuda.conv_direct import Depthwise, DirectConv, DirectConvTranspose
from optdnn.tactics.cuda.conv_fp32 import TiledConv, TiledGemm
from optdnn.tactics.cuda.conv_pool import PooledConv
from optdnn.tactics.cuda.conv_sm80 import GeneralConv, GeneralGemm
from optdnn.tactics.cuda.conv_stem import StemConv
from optdnn.tactics.cuda.conv_transpose import GeneralConvTranspose, HopperConvTranspose, TiledConvTranspose
from optdnn.tactics.cuda.cudnn_attention import CudnnAttention
from optdnn.tactics.cuda.custom import Custom
from optdnn.tactics.cuda.depthwise import DepthwiseOfIntegers, HalfDepthwise
from optdnn.tactics.cuda.described import OPERATIONS, HalfRows, QuantizedRows
from optdnn.tactics.cuda.elementwise import Elementwise
from optdnn.tactics.cuda.gather import GatherBy, GatherView, Pad, Resize
from optdnn.tactics.cuda.gemm import HopperGemm
from optdnn.tactics.cuda.gemv import Gemv
from optdnn.tactics.cuda.group_norm import HalfGroupNorm
from optdnn.tactics.cuda.libraries import CublasLtBatched, CublasLtGemm, CudnnConv, CudnnNorm
from optdnn.tactics.cuda.matmul import TiledMatMul
from optdnn.tactics.cuda.matmul_sm90 import HopperMatMul
from optdnn.tactics.cuda.max_pool import TiledMaxPool
from optdnn.tactics.cuda.numeric import NUMERIC, Numeric
from optdnn.tactics.cuda.pool import GlobalPool, WindowPool
from optdnn.tactics.cuda.positions import POSITIONS, Positions
from optdnn.tactics.cuda.quantized import (
    HopperQuantizedConv,
    HopperQuantizedMatMul,
)
from optdnn.tactics.cuda.quantized_bands import BandedQuantizedConv
from optdnn.tactics.cuda.quantized_pools import MaxPoolOfIntegers, MeanOfIntegers
from optdnn.tactics.cuda.quantized_sm80 import GeneralQuantizedConv, GeneralQuantizedMatMul
from optdnn.tactics.cuda.reduce import REDUCTIONS, Reduction
from optdnn.tactics.cuda.regions import REGIONS, Regions
from optdnn.tactics.cuda.rnn import HopperRNN
from optdnn.tactics.cuda.rnn_general import GeneralRNN
from optdnn.tactics.cuda.rows import BatchNorm, LocalResponse, Rows
from optdnn.tactics.cuda.separable import Separable
from optdnn.tactics.cuda.tactic import Tactic

_OWN: dict[str, tuple[Tactic, ...]] = {
    "Conv": (
        PooledConv(),
        Separable(),
        BlockConv(),
        StemConv(),
        HopperConv(),
        HalfDepthwise(),
        Depthwise(),
        BandedConv(),
        GeneralConv(),
        TiledConv(),
        DirectConv(),
        CudnnConv(),
    ),
    "Custom": (Custom(),),
    "ConvTranspose": (HopperConvTranspose(), GeneralConvTranspose(), TiledConvTranspose(), DirectConvTranspose()),
    "MatMul": (
        Gemv(),
        HopperGemm(),
        GeneralGemm(),
        TiledGemm(),
        HopperMatMul(),
        TiledMatMul(),
        CublasLtGemm(),
        CublasLtBatched(),
    ),
    "Gemm": (
        Gemv(),
        HopperGemm(),
        GeneralGemm(),
        TiledGemm(),
        TiledMatMul(),
        CublasLtGemm(),
        CublasLtBatched(),
    ),
    "QuantizedConv": (HopperQuantizedConv(), DepthwiseOfIntegers(), BandedQuantizedConv(), GeneralQuantizedConv()),
    "QuantizedMatMul": (HopperQuantizedMatMul(), GeneralQuantizedMatMul()),
    "QuantizedMean": (MeanOfIntegers(),),
    "MaxPool": (MaxPoolOfIntegers(), TiledMaxPool(), WindowPool()),
    "AveragePool": (WindowPool(),),
    "Resize": (Resize(),),
    "Pad": (Pad(),),
    "BatchNormalization": (BatchNorm(),),
    "LRN": (LocalResponse(),),
    **dict.fromkeys(("ArgMax", "ArgMin"), (ArgExtreme(),)),
    "RNN": (GeneralRNN(),),
    "GRU": (HopperRNN(), GeneralRNN()),
    "LSTM": (HopperRNN(), GeneralRNN()),
    "Attention": (HopperAttention(), GeneralAttention(), AttentionSteps(), CudnnAttention()),
    "Gather": (GatherView(), GatherBy()),
    **dict.fromkeys(("GatherElements", "GatherND"), (GatherBy(),)),
    **dict.fromkeys(OPERATIONS, (HalfRows(), Rows())),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), (QuantizedRows(), HalfRows(), Rows(), CudnnNorm())),
    **dict.fromkeys(("InstanceNormalization", "GroupNormalization"), (HalfGroupNorm(), Rows())),
    **dict.fromkeys(("LpNormalization", "MeanVarianceNormalization"), (Rows(),)),
    "LpPool": (WindowPool(),),
    **dict.fromkeys(POSITIONS, (Positions(),)),
    **dict.fromkeys(REDUCTIONS, (Reduction(),)),
    "GlobalAveragePool": (GlobalPool(),),
    "GlobalMaxPool": (GlobalPool(),),
    **{kind: (Elementwise(),) for kind, d in OPDEFS.items() if d.traits.pointwise and kind != "Identity"},
    "Add": (AddNorm(), PlainAdd()),
}

_LAST: dict[str, Tactic] = dict.fromkeys(NUMERIC, Numeric()) | dict.fromkeys(REGIONS, Regions())
"""General ways, where nothing better takes an operator."""

TACTICS: dict[str, tuple[Tactic, ...]] = _OWN | {kind: (*_OWN.get(kind, ()), one) for kind, one in _LAST.items()}
"""Kind -> its tactics in order of preference (kinds of :data:`optdnn.tactics.cuda.views.VIEWS` need none)."""

WRITES_ANYWHERE = frozenset(TACTICS) - {"Gather", "LSTM", "GRU", "RNN"}
"""Kinds whose kernels write to a reserved place of any strides (a Gather may be a view, a
recurrent layer's states lie together: they would have to be copied there)."""
