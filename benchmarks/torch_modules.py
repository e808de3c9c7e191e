"""Networks of ``optdnn.models.zoo`` as PyTorch modules, with the weights of the ONNX model.

torchvision's and transformers' own modules: the zoo's models carry the very names of their parameters, so both sides compute
the same function. ``factory(name, state)`` gives a module in evaluation mode and fp32, called with the ONNX inputs in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

Array = np.ndarray[Any, np.dtype[Any]]
_GATES = (0, 2, 3, 1)
"""For each gate in torch's order (input, forget, cell, output), its index in ONNX's order (input, output, forget, cell)."""
_NOT_STORED = ("num_batches_tracked", "position_ids", "token_type_ids")


class Bert(nn.Module):
    """BertModel on ``input_ids``, ``attention_mask``, ``token_type_ids``; gives the last hidden state and the pooled output.

    The mask is passed as the tensor that is added to the scores. Otherwise the model would branch on the mask's values, which a
    CUDA graph cannot do.
    """

    def __init__(self, positions: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        self.bert = BertModel(BertConfig(max_position_embeddings=positions, attn_implementation="sdpa"))

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, types: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = self.bert.embeddings.word_embeddings.weight.dtype
        bias = (1 - mask[:, None, None, :].to(dtype)) * torch.finfo(dtype).min
        bias = bias.expand(-1, 1, ids.shape[1], -1)
        out = self.bert(input_ids=ids, attention_mask=bias, token_type_ids=types)
        return out.last_hidden_state, out.pooler_output


class Lstm(nn.Module):
    """Two layers of 512 units on (sequence, batch, 512); gives all outputs and the last states."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(512, 512, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y, (h, c) = self.rnn(x)
        return y, h, c


def _vision(name: str) -> Callable[[Mapping[str, Array]], nn.Module]:
    def make(state: Mapping[str, Array]) -> nn.Module:
        from torchvision import models

        return _filled(getattr(models, name)(weights=None), state)

    return make


def _bert(state: Mapping[str, Array]) -> nn.Module:
    module = Bert(state["embeddings.position_embeddings.weight"].shape[0])
    _filled(module.bert, state)
    return module


def _lstm(state: Mapping[str, Array]) -> nn.Module:
    module = Lstm()
    found = {}
    for layer in range(2):
        for part in ("weight_ih", "weight_hh", "bias"):
            array = state[f"{part}_l{layer}.LSTM"][0]
            blocks = array.reshape(2 if part == "bias" else 1, 4, 512, -1)[:, list(_GATES)]
            if part == "bias":
                for half, key in zip(blocks, ("bias_ih", "bias_hh"), strict=True):
                    found[f"{key}_l{layer}"] = half.reshape(-1)
            else:
                found[f"{part}_l{layer}"] = blocks.reshape(array.shape)
    _filled(module.rnn, found)
    return module


def _filled(module: nn.Module, state: Mapping[str, Array]) -> nn.Module:
    """The module with these weights; "NAME.T" is the transpose of NAME. Raises ValueError if any are missing."""
    given = {k.removesuffix(".T"): torch.from_numpy(np.array(v.T if k.endswith(".T") else v)) for k, v in state.items()}
    wanted = [k for k in module.state_dict() if not k.endswith(_NOT_STORED)]
    if missing := [k for k in wanted if k not in given]:
        raise ValueError(f"the ONNX model has no weights {', '.join(missing[:4])}")
    module.load_state_dict({k: given[k].reshape(module.state_dict()[k].shape) for k in wanted}, strict=False)
    return module


FACTORIES: dict[str, Callable[[Mapping[str, Array]], nn.Module]] = {
    **{
        name: _vision(name)
        for name in ("resnet50", "mobilenet_v2", "efficientnet_b0", "densenet121", "vgg16", "vit_b_16")
    },
    "bert_base": _bert,
    "lstm": _lstm,
}
"""Network of the zoo -> the module with these weights (its ONNX initializers)."""


def factory(name: str, state: Mapping[str, Array]) -> nn.Module:
    """The module of a network of the zoo, in evaluation mode, fp32, on the host."""
    return FACTORIES[name](state).eval()
