"""How many clusters of each size run side by side on a GPU where a block fills a multiprocessor: splits have to fit in there.

python benchmarks/gpu/clusters.py --out clusters.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from optdnn.runtime.cuda import conv, nvrtc
from optdnn.runtime.cuda.conv_problem import Problem, Source
from optdnn.runtime.cuda.device import Device, Launch, check, driver


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.zeros(1, device="cuda")
    device, cache, cu = Device.open(0), nvrtc.KernelCache(Path("/tmp/kernels-clusters")), driver()
    problem = Problem(1, 512, (Source(28, 28, 512, (3, 3), (1, 1), (1, 1, 1, 1)),))
    config = conv.Config(2, 1, 1, 72, 7, 3)
    found = {}
    for size in range(1, 17):
        function = conv.load(problem, config, cache)
        key = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
        check("cuFuncSetAttribute", cu.cuFuncSetAttribute(function.handle, key, 1))
        launch = Launch(function, (size * 64, 1, 1), config.threads, [bytes(1024)], shared=200 << 10, cluster=size)
        found[size] = launch.clusters_per_device()
    print(found)
    options.out.write_text(json.dumps({"gpu": device.name, "clusters": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
