"""Writes attention_exports.tar.xz: small transformers from both of torch's exporters, with symbolic batch and lengths.

    pip install torch transformers onnxscript && python tests/golden/make_attention_exports.py

Architectures of Hugging Face with random weights, rounded to sixteenths: only the form of the graphs matters (torch 2.13,
transformers 5.23). NAME.ts.onnx comes from torch.onnx.export(dynamo=False) at opset 17, NAME.dyn.onnx from torch.export.
"""

from __future__ import annotations

import io
import lzma
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx

HIDDEN, WORDS = 8, 50
SMALL: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 12,
}
AXES = {
    "input_ids": ("batch", "length"),
    "attention_mask": ("batch", "length"),
    "decoder_input_ids": ("batch", "target"),
    "decoder_attention_mask": ("batch", "target"),
    "pixel_values": ("batch",),
    "input_features": ("batch",),
}


def networks(tr: Any) -> dict[str, tuple[Any, tuple[str, ...], str]]:
    """Name -> module, its inputs and output."""
    text, vocabulary = {"max_position_embeddings": 16, **SMALL}, {"vocab_size": WORDS}
    vision = {"image_size": 16, "patch_size": 8, **SMALL}
    ids = ("input_ids", "attention_mask")
    last = "last_hidden_state"
    whisper = tr.WhisperConfig(
        **vocabulary, num_mel_bins=4, d_model=HIDDEN, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=12, decoder_ffn_dim=12, max_source_positions=10, max_target_positions=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    swin = tr.SwinConfig(image_size=16, patch_size=2, embed_dim=HIDDEN, depths=[2], num_heads=[2], window_size=4)
    clip = tr.CLIPConfig(
        text_config={**vocabulary, **text, "eos_token_id": 2, "projection_dim": 8},
        vision_config={**vision, "projection_dim": 8},
        projection_dim=8,
    )
    deberta = tr.DebertaV2Config(
        **vocabulary, **text, relative_attention=True, position_buckets=4, pos_att_type=["p2c", "c2p"]
    )
    t5 = tr.T5Config(**vocabulary, d_model=HIDDEN, d_kv=4, d_ff=12, num_layers=2, num_heads=2)
    gpt2 = tr.GPT2Config(**vocabulary, n_positions=16, n_embd=HIDDEN, n_layer=1, n_head=2)
    llama = tr.LlamaConfig(**vocabulary, **text, num_key_value_heads=1)
    return {
        "vit": (tr.ViTModel(tr.ViTConfig(**vision)), ("pixel_values",), last),
        "swin": (tr.SwinModel(swin), ("pixel_values",), last),
        "bert": (tr.BertModel(tr.BertConfig(**vocabulary, **text)), ids, last),
        "gpt2": (tr.GPT2Model(gpt2), ids, last),
        "llama": (tr.LlamaModel(llama), ids, last),
        "t5": (tr.T5Model(t5), (*ids, "decoder_input_ids"), last),
        "whisper": (
            tr.WhisperModel(whisper),
            ("input_features", "decoder_input_ids", "decoder_attention_mask"),
            last,
        ),
        "clip": (tr.CLIPModel(clip), (*ids, "pixel_values"), "logits_per_image"),
        "deberta": (tr.DebertaV2Model(deberta), ids, last),
    }


def examples(torch: Any) -> dict[str, Any]:
    """Inputs of two samples."""
    mask, later = torch.ones(2, 7, dtype=torch.int64), torch.ones(2, 5, dtype=torch.int64)
    mask[1, 5:] = later[1, 4:] = 0
    return {
        "input_ids": torch.randint(1, WORDS, (2, 7)),
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(1, WORDS, (2, 5)),
        "decoder_attention_mask": later,
        "pixel_values": torch.randn(2, 3, 16, 16),
        "input_features": torch.randn(2, 4, 20),
    }


def exported(torch: Any, module: Any, names: tuple[str, ...], output: str, dynamo: bool) -> onnx.ModelProto:
    """``module``, called with keywords, as ONNX."""
    options = (
        {} if "pixel_values" in names or type(module).__name__.startswith(("Bert", "Deberta")) else {"use_cache": False}
    )
    scope: dict[str, Any] = {"module": module, "options": options}
    # The exporters require a forward with the names of the parameters.
    arguments = ", ".join(names)
    given = ", ".join(f"{n}={n}" for n in names)
    exec(f"def forward({arguments}):\n    return module({given}, **options)[{output!r}]", scope)

    class Called(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.module = module
            self.forward = scope["forward"]

    feeds = examples(torch)
    args, buffer = tuple(feeds[n] for n in names), io.BytesIO()
    common = {"input_names": list(names), "output_names": ["y"]}
    with torch.no_grad():
        if dynamo:
            dims = {n: torch.export.Dim(n, min=2, max=12) for n in ("batch", "length", "target")}
            shapes = {n: {a: dims[d] for a, d in enumerate(AXES[n])} for n in names}
            program = torch.onnx.export(
                Called().eval(), args, dynamo=True, dynamic_shapes=shapes, verbose=False, **common
            )
            return program.model_proto  # type: ignore[no-any-return]
        axes = {n: dict(enumerate(AXES[n])) for n in names}
        torch.onnx.export(
            Called().eval(), args, buffer, dynamo=False, dynamic_axes=axes, opset_version=17, **common
        )  # fmt: skip
    return onnx.load_model_from_string(buffer.getvalue())


def stripped(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without information about its origin, and with weights that compress well."""

    def strip(graph: onnx.GraphProto) -> None:
        del graph.value_info[:]
        for item in (graph, *graph.input, *graph.output, *graph.node, *graph.initializer):
            item.doc_string = ""
            del item.metadata_props[:]
        for t in graph.initializer:
            a = onnx.numpy_helper.to_array(t)
            if a.dtype == np.float32 and a.size > 16 and np.isfinite(a).all() and np.abs(a).max() < 1e3:
                t.CopyFrom(onnx.numpy_helper.from_array((np.round(a * 16) / 16).astype(np.float32), t.name))
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("g"):
                    strip(attribute.g)

    strip(model.graph)
    model.doc_string = ""
    del model.metadata_props[:]
    return model


def main() -> None:
    import torch  # type: ignore[import-not-found, unused-ignore]
    import transformers  # type: ignore[import-not-found, unused-ignore]

    torch.manual_seed(0)
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, (module, names, output) in networks(transformers).items():
            for form in ("ts", "dyn"):
                model = stripped(exported(torch, module.eval(), names, output, form == "dyn"))
                data = model.SerializeToString(deterministic=True)
                info = tarfile.TarInfo(f"{name}.{form}.onnx")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    Path(__file__).with_name("attention_exports.tar.xz").write_bytes(
        lzma.compress(packed.getvalue(), preset=9 | lzma.PRESET_EXTREME)
    )


if __name__ == "__main__":
    main()
