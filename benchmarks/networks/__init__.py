"""Networks that no installed library has, written as in their papers, some with fewer blocks: the source ``torch``.

``make`` of a workload ``torch/NAME`` is the name of a class here, ``options`` are its arguments.
"""

from benchmarks.networks.audio import BigVGAN, WaveNet
from benchmarks.networks.others import (
    DGCNN,
    DLRM,
    KAN,
    ConvLstm,
    CouplingFlow,
    GraphAttention,
    PairBlock,
    Recurrent,
    SignalNet,
)
from benchmarks.networks.pictures import CRNN, X3D, BiFPN, Board, NAFNet, Restormer, RRDBNet, StyleGan2, UNet3d, YoloV8

__all__ = [
    "CRNN",
    "DGCNN",
    "DLRM",
    "KAN",
    "X3D",
    "BiFPN",
    "BigVGAN",
    "Board",
    "ConvLstm",
    "CouplingFlow",
    "GraphAttention",
    "NAFNet",
    "PairBlock",
    "RRDBNet",
    "Recurrent",
    "Restormer",
    "SignalNet",
    "StyleGan2",
    "UNet3d",
    "WaveNet",
    "YoloV8",
]
