"""Networks that no installed library has, written as in their papers, some with fewer blocks: the source ``torch``.

A workload ``torch/NAME`` names one of these classes with ``make`` and its arguments with ``options``.
"""

from benchmarks.networks.others import (
    DGCNN,
    DLRM,
    KAN,
    ConvLstm,
    CouplingFlow,
    GraphNetwork,
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
    "Board",
    "ConvLstm",
    "CouplingFlow",
    "GraphNetwork",
    "NAFNet",
    "PairBlock",
    "RRDBNet",
    "Recurrent",
    "Restormer",
    "SignalNet",
    "StyleGan2",
    "UNet3d",
    "YoloV8",
]
