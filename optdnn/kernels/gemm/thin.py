"""Thin products: each thread computes a few elements of a result. A tile would be nearly empty."""

from __future__ import annotations

from dataclasses import dataclass

from optdnn.kernels.builder import TensorView
from optdnn.kernels.gemm import terms
from optdnn.kernels.gemm.stacks import Matrices
from optdnn.kernels.gemm.terms import DEPTH, plain_seconds
from optdnn.kernels.pointwise.expressions import CPP
from optdnn.kernels.pointwise.strides import vector
from optdnn.runtime.cuda.gpu_facts import GpuFacts
from optdnn.types import FP32

THREADS = 256
THIN = 8
"""Most rows or columns of a thin product: a tile would be nearly empty, so each thread computes a few elements."""
SMALL, MANY, FEW_TERMS = 16, 4096, 64
"""Most rows or columns, least matrices and most terms of products that are thin because there are very many small ones."""
TOGETHER, MOST_RESULTS = 8, 72
"""Most columns of all rows (or rows of all columns) that a thread of a thin product takes, and most results: their sums are in registers."""
ENOUGH_THREADS = 1 << 16
"""Threads that occupy a GPU well."""
THIN_S, APART = 5e-13, 8
"""Seconds per term of a thin product, on all multiprocessors (50,176 of 9 x 9 with 9 x 32 take 66 us on an H200), and an assumed factor
where neighboring columns do not lie together."""
WIDE_BYTES, LONG_S = 3.2e12, 1.6e-12
"""Bytes per second of thin products of fp32, and seconds per term of longer ones: 40 timings on an H200."""
UNROLLED = 256
"""Most multiplications of a thread of a thin product that are unrolled."""
LEAST_ELEMENTS = 8192
"""Least elements of a thin product. Fewer do not keep the GPU's threads busy, and a tile sums along K."""
LONGEST = 256
"""Most terms of a sum in a thin product."""


@dataclass(frozen=True)
class Share:
    """The rows and columns of a result that a thread of a thin product computes. ``vectors``: neighboring columns are read and written
    in one access."""

    rows: int
    columns: int
    vectors: bool = False

    @classmethod
    def wide(cls, m: int, n: int, k: int, matrices: int, width: int) -> Share:
        """:meth:`of` for fp32: the fastest of ten in 20 timings on an H200."""
        if k > FEW_TERMS:
            return cls(1, min(4, n), width == 4)
        rows, columns = (8, 1) if width == 1 else (2, width) if n <= m else (4, 2)
        found = cls(min(rows, m), min(columns, n), 1 < columns <= n and width % columns == 0)
        return found if found.threads(m, n, matrices) >= ENOUGH_THREADS // 4 else cls(1, 1)

    @classmethod
    def of(cls, m: int, n: int, k: int, matrices: int, width: int = 1) -> Share:
        """The largest share of ``m x n`` results with which enough threads remain. Its values are read once for all of its results.
        ``width``: columns of one access."""
        wide = n <= m
        most = MOST_RESULTS if k <= DEPTH else MOST_RESULTS // 2  # partial sums double the registers
        for along in (TOGETHER, 4, 2, 1):
            rows, columns = (min(along, m), min(n, SMALL)) if wide else (min(m, SMALL), min(along, n))
            found = cls(rows, columns, columns > 1 and width % columns == 0)
            if rows * columns <= most and found.threads(m, n, matrices) >= ENOUGH_THREADS:
                return found
        return cls(1, 1)

    def threads(self, m: int, n: int, matrices: int) -> int:
        return matrices * -(-m // self.rows) * -(-n // self.columns)


def share_of(p: Matrices) -> Share:
    """What a thread computes if the product is thin."""
    m, n, k = p.sizes
    read, written = ((*s, *x.strides[-2:]) for s, x in ((p.steps[2], p.right), (p.steps[0], p.result)))
    width = vector([p.result, p.right], [n], [written, read]) if read[-1] == 1 else 1
    return (Share.wide if p.left.dtype == FP32 else Share.of)(m, n, k, p.count, width)


def thin_parts(m: int, n: int, k: int, matrices: int, right: TensorView, gpu: GpuFacts) -> int:
    """Parts whose products are thin, of a product in fp32 with too many terms; 0 if there are none, or if the plain kernel is faster."""
    parts = -(-k // LONGEST)
    if not 1 < parts <= terms.MOST_PARTS or not is_thin(m, n, k // parts, matrices * parts, wide=True):
        return 0
    faster = thin_seconds(m, n, k, matrices, right) < plain_seconds(m, n, k, matrices, gpu)
    return parts if faster else 0


def is_thin(m: int, n: int, k: int, matrices: int, *, wide: bool = False) -> bool:
    """Whether products of m rows, n columns and k terms suit threads that compute a few elements each. ``wide``: of fp32."""
    small = min(m, n) <= SMALL and ((matrices >= MANY and k <= FEW_TERMS) or (wide and k <= DEPTH))
    return (min(m, n) <= THIN or small) and k <= LONGEST and m * n * matrices >= LEAST_ELEMENTS


def thin_seconds(m: int, n: int, k: int, matrices: int, right: TensorView) -> float:
    """Predicted seconds of a thin product, without those of a launch. ``right``: its second factor."""
    if right.dtype == FP32:
        moved = 4 * matrices * (m * k + k * n + m * n) / WIDE_BYTES * (1 if right.strides[-1] in (0, 1) else 2)
        return moved + (m * n * k * matrices * LONG_S if k > FEW_TERMS else 0.0)
    return m * n * k * matrices * THIN_S * (1 if right.strides[-1] in (0, 1) else APART)


def share_text(share: Share) -> str:
    """C++ of the number of a thread's share, and of the shares of a matrix."""
    columns = f"(u32(p.n) + {share.columns - 1}u) / {share.columns}u"
    return (
        f"const u32 share = blockIdx.x * {THREADS}u + threadIdx.x, shares = {columns};\n"
        f"    const u32 area = (u32(p.m) + {share.rows - 1}u) / {share.rows}u * shares;"
    )


def thin_text(t: str, p: Matrices, share: Share, finish: str) -> str:
    """C++ of a thread's share of a thin product; neighboring threads take neighboring columns. ``finish``: as of :func:`_plain`. Terms are
    added as there: sums of :data:`DEPTH`, and then these."""
    r, c, terms, parts = share.rows, share.columns, min(p.sizes[2], DEPTH), p.sizes[2] > DEPTH
    into, each = "part" if parts else "acc", "#pragma unroll\n        for (int i = 0; i < {}; i++)".format
    right = f"first + j < p.n ? {t}(widen(p.r[br + (k0 + k) * p.mr[0] + (first + j) * p.mr[1]])) : {t}(0)"
    read = begin = end = held = ""
    left, lanes = "widen(p.l[bl + (top + i) * p.ml[0] + (k0 + k) * p.ml[1]])", p.together()
    if lanes > 1:
        pack = f"Pack<{CPP[p.left.dtype]}, {lanes}>"
        held, left = f"{pack} held[{r}];", f"widen(held[i].lane[k % {lanes}])"
        load = f"held[i] = {pack}(p.l + bl + (top + i) * p.ml[0] + k0 + k);"
        read = f"if (k % {lanes} == 0) {{\n        {each(r)} if (top + i < p.m) {load} }}"
    if share.vectors:
        read += f"const Pack<{CPP[p.right.dtype]}, {c}> read(p.r + br + (k0 + k) * p.mr[0] + first);"
        right = f"{t}(widen(read.lane[j]))"
        begin, end = f"Pack<{CPP[p.result.dtype]}, {c}> out;", "out.store(p.y + by + (top + i) * p.my[0] + first);"

    def step(begin: str, end: str, *, whole: bool) -> str:
        return f"""for (int k0 = {begin}; k0 < {end}; k0 += {DEPTH}) {{
        {f"{t} part[{r}][{c}] = {{}};" if parts else ""}
        {held}
        {"#pragma unroll" if held or r * c * terms <= UNROLLED else ""}
        for (int k = 0; k < {terms}; k++) {{
            {"" if whole else "if (k0 + k >= p.k) break;"}
            {read}
            {t} right[{c}];
            #pragma unroll
            for (int j = 0; j < {c}; j++) right[j] = {right};
            #pragma unroll
            for (int i = 0; i < {r}; i++) {{
                const {t} left = top + i < p.m ? {t}({left}) : {t}(0);
                #pragma unroll
                for (int j = 0; j < {c}; j++) {into}[i][j] += left * right[j];
            }}
        }}
        {f"{each(r)} for (int j = 0; j < {c}; j++) acc[i][j] += part[i][j];" if parts else ""}
    }}"""

    whole = p.sizes[2] // terms * terms
    steps = step("0", f"{whole}", whole=True) + (step(f"{whole}", "p.k", whole=False) if p.sizes[2] % terms else "")
    return f"""const u32 inside = share % area;
    const int top = inside / shares * {r}, first = inside % shares * {c};
    if (share / area >= p.matrices) return;
    {t} acc[{r}][{c}] = {{}};
    {steps}
    {each(r)} {{
        if (top + i >= p.m) continue;
        {begin}
        #pragma unroll
        for (int j = 0; j < {c}; j++) {{
            const int row = top + i, column = first + j;
            if (column >= p.n) continue;
            {finish}
        }}
        {end}
    }}"""
