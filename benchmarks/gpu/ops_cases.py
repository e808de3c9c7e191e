"""The problems that ops_round.py checks and times, by kernel family; no GPU is needed here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from optdnn.runtime.cuda import (
    attention,
    attention_general,
    depthwise,
    depthwise_tma,
    group_norm,
    nvrtc,
    rnn,
    rows,
)
from optdnn.runtime.cuda.conv_problem import Source
from optdnn.runtime.cuda.gpu_facts import of_arch

FAMILIES = ("depthwise", "rows", "group_norm", "attention", "attention_general", "rnn")
SILU, RELU6 = (("bias",), ("silu",)), (("bias",), ("clip", 0.0, 6.0))


# ---- cases: (problem, configurations to check) ------------------------------------------------------------------------------


def same(h: int, w: int, c: int, k: int, s: int = 1, d: int = 1) -> Source:
    pad = (k - 1) * d // 2
    return Source(h, w, c, (k, k), (s, s), (pad, pad, pad, pad), (d, d))


def depthwise_checks() -> list[depthwise.Problem]:
    p = depthwise.Problem
    return [
        p(2, same(13, 11, 24, 3), SILU),
        p(3, same(15, 17, 40, 3, 2), RELU6, "bfloat16"),
        p(1, same(9, 9, 8, 5), (("bias",),)),
        p(2, same(14, 14, 80, 5, 2), (("bias",), ("silu",)), squeeze=True),
        p(2, same(12, 19, 16, 7), (("bias",), ("add",))),
        p(1, same(16, 16, 32, 3, 1, 2), RELU6),
        p(2, Source(10, 12, 48, (3, 5), (1, 2), (0, 2, 2, 1), (1, 1)), SILU, squeeze=True),
        p(2, same(7, 7, 960, 3), RELU6, squeeze=True),
    ]


def depthwise_timed() -> list[tuple[str, depthwise.Problem]]:
    shapes = {  # MobileNetV2 (relu6) and EfficientNet-B0 (silu): height, channels, kernel, stride
        "mb 112x32 3s1": (112, 32, 3, 1, RELU6), "mb 112x96 3s2": (112, 96, 3, 2, RELU6), "mb 56x144 3s1": (56, 144, 3, 1, RELU6),
        "mb 28x192 3s1": (28, 192, 3, 1, RELU6), "mb 14x384 3s1": (14, 384, 3, 1, RELU6), "mb 7x960 3s1": (7, 960, 3, 1, RELU6),
        "ef 56x144 5s2": (56, 144, 5, 2, SILU), "ef 28x240 5s1": (28, 240, 5, 1, SILU), "ef 14x672 5s1": (14, 672, 5, 1, SILU),
    }  # fmt: skip
    return [
        (f"{name} b{batch}", depthwise.Problem(batch, same(h, h, c, k, s), stages))
        for batch in (1, 128)
        for name, (h, c, k, s, stages) in shapes.items()
    ]


def rows_checks() -> list[rows.Problem]:
    p = rows.Problem
    return [
        p("layer_norm", 5, 768, add=True, sum=True),
        p("layer_norm", 77, 96, "bfloat16"),
        p("layer_norm", 3, 1001, bias=False),
        p("layer_norm", 9, 20, scale=False, bias=False, epsilon=1e-3),
        p("rms_norm", 130, 4096, add=True, bias=False),
        p("rms_norm", 2, 6, bias=False),
        p("softmax", 33, 197),
        p("softmax", 4, 1000, "bfloat16"),
        p("softmax", 300, 10, factor=0.3),
        p("log_softmax", 7, 12346),
    ]


def rows_timed() -> list[tuple[str, rows.Problem]]:
    found = []
    for name, count in (("BERT b1", 128), ("BERT b32", 4096), ("ViT b32", 32 * 197)):
        found.append((f"layer_norm+add {name}", rows.Problem("layer_norm", count, 768, add=True, sum=True)))
    found.append(("layer_norm ViT b32", rows.Problem("layer_norm", 32 * 197, 768)))
    found.append(("layer_norm big", rows.Problem("layer_norm", 1 << 16, 1024)))
    found.append(("softmax 12x128x128 b1", rows.Problem("softmax", 12 * 128, 128)))
    found.append(("softmax 12x128x128 b32", rows.Problem("softmax", 32 * 12 * 128, 128)))
    found.append(("softmax 1000 b128", rows.Problem("softmax", 128, 1000)))
    return found


def group_norm_checks() -> list[group_norm.Problem]:
    p = group_norm.Problem
    return [
        p(2, 35, 320, 32, (("silu",),)),
        p(3, 49, 24, 24, (), "bfloat16"),
        p(2, 1000, 40, 4),
        p(1, 50, 15, 5),
        p(2, 4096, 64, 8, (("relu",),)),
    ]


def group_norm_timed() -> list[tuple[str, group_norm.Problem]]:
    return [
        ("64x64x320 b2 + silu", group_norm.Problem(2, 4096, 320, 32, (("silu",),))),
        ("64x64x320 b16 + silu", group_norm.Problem(16, 4096, 320, 32, (("silu",),))),
    ]


def merged(b: int, h: int, s: int, f: int, **options: Any) -> attention.Problem:
    q, k, v = (attention.bshd(s, h, f, parts=3, part=i) for i in range(3))
    return attention.Problem(b, h, s, s, f, f**-0.5, q, k, v, attention.bshd(s, h, f), **options)


def apart(b: int, h: int, s: int, t: int, f: int, kv: int = 0, **options: Any) -> attention.Problem:
    q, k, o = attention.bhsd(s, h, f), attention.bhsd(t, kv or h, f), attention.bshd(s, h, f)
    return attention.Problem(b, h, s, t, f, f**-0.5, q, k, k, o, key_heads=kv, **options)


def attention_checks() -> list[attention.Problem]:
    return [
        merged(2, 3, 128, 64, mask=(128, 0, 0)),
        merged(1, 2, 197, 64),
        merged(2, 2, 77, 32, dtype="bfloat16"),
        merged(1, 3, 100, 80, mask=(0, 100 * 100, 100)),
        merged(2, 2, 131, 96, causal=True),
        merged(1, 2, 300, 128, lengths=True),
        apart(2, 4, 70, 333, 64, kv=2, mask=(0, 0, 333)),
        apart(1, 2, 5, 1000, 40, causal=True, causal_offset=995),
        merged(1, 2, 513, 128, causal=True, dtype="bfloat16"),
        merged(60, 12, 197, 64),  # more than run at a time
        merged(61, 9, 100, 80, mask=(100 * 100, 0, 100)),
        merged(90, 11, 150, 64, causal=True, lengths=True, dtype="bfloat16"),
    ]


def attention_timed() -> list[tuple[str, attention.Problem]]:
    return [
        ("BERT b1", merged(1, 12, 128, 64, mask=(128, 0, 0))),
        ("BERT b32", merged(32, 12, 128, 64, mask=(128, 0, 0))),
        ("BERT b32 no mask", merged(32, 12, 128, 64)),
        ("ViT b1", merged(1, 12, 197, 64)),
        ("ViT b32", merged(32, 12, 197, 64)),
        ("2048x128 causal b4", merged(4, 16, 2048, 128, causal=True)),
        ("2048x64 b4", merged(4, 16, 2048, 64)),
    ]


def general_attention_checks() -> list[attention.Problem]:
    return [
        *attention_checks(),
        merged(2, 3, 150, 200),
        apart(2, 4, 70, 333, 256, kv=2, causal=True, causal_offset=263),
    ]


def general_attention_timed() -> list[tuple[str, attention.Problem]]:
    return [*attention_timed(), ("1024x256 b4", merged(4, 16, 1024, 256))]


def rnn_checks() -> list[rnn.Problem]:
    p = rnn.Problem
    return [
        p("lstm", 1, 1, 32, 32),
        p("lstm", 7, 3, 40, 64),
        p("lstm", 20, 1, 512, 512, 2),
        p("lstm", 9, 19, 96, 128, 2, initial=True),
        p("gru", 12, 5, 72, 96, 2, "bfloat16", True, True),
        p("gru", 10, 2, 512, 512, 1),
        p("lstm", 11, 32, 512, 512, 2),
    ]


def rnn_timed() -> list[tuple[str, rnn.Problem]]:
    return [(f"LSTM 2x512 128 steps b{b}", rnn.Problem("lstm", 128, b, 512, 512, 2)) for b in (1, 8, 32)]


def configs(family: str, problem: Any, limit: int) -> list[Any]:
    """What to check or time. Large depthwise problems are for TMA, small ones for the direct kernel."""
    device = of_arch("sm_90a")
    if family != "depthwise":
        return MODULES[family].candidates(problem, device, limit)  # type: ignore[no-any-return]
    direct = depthwise.candidates(problem, device, 2 if problem.batch > 3 else limit)
    return [*direct, *depthwise_tma.candidates(problem, device, 2 if problem.batch == 1 else limit)]


def module_of(family: str, config: Any) -> Any:
    """The module that plans this kind of configuration."""
    return depthwise_tma if isinstance(config, depthwise_tma.Config) else MODULES[family]


MODULES: dict[str, Any] = {
    "depthwise": depthwise, "rows": rows, "group_norm": group_norm, "attention": attention,
    "attention_general": attention_general, "rnn": rnn,
}  # fmt: skip
CHECKS: dict[str, Callable[[], list[Any]]] = {
    "depthwise": depthwise_checks, "rows": rows_checks, "group_norm": group_norm_checks,
    "attention": attention_checks, "attention_general": general_attention_checks, "rnn": rnn_checks,
}  # fmt: skip
TIMED: dict[str, Callable[[], list[tuple[str, Any]]]] = {
    "depthwise": depthwise_timed, "rows": rows_timed, "group_norm": group_norm_timed,
    "attention": attention_timed, "attention_general": general_attention_timed, "rnn": rnn_timed,
}  # fmt: skip
LIMITS = {
    "depthwise": (4, 7), "rows": (8, 12), "group_norm": (4, 4), "attention": (8, 14), "attention_general": (8, 14), "rnn": (4, 4),
}  # fmt: skip


def recipe_of(family: str, problem: Any, config: Any) -> nvrtc.Recipe:
    """With waits that trap, where there are any."""
    module = module_of(family, config)
    options = {"checked": True} if module in (attention, rnn, depthwise_tma) else {}
    return module.recipe(problem, config, **options)  # type: ignore[no-any-return]


def all_recipes() -> list[nvrtc.Recipe]:
    found = {r.key(): r for r in (depthwise.squeeze_recipe(depthwise_checks()[i]) for i in (0, 1))}
    for family in FAMILIES:
        checks, timed = LIMITS[family]
        jobs = [(p, checks) for p in CHECKS[family]()] + [(p, timed) for _, p in TIMED[family]()]
        for problem, limit in jobs:
            for config in configs(family, problem, limit):
                made = recipe_of(family, problem, config)
                found[made.key()] = made
    return list(found.values())
