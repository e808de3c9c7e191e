"""What the machine has: packages, driver, GPU, where the libraries lie. For whoever prepares a round of measurements."""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    print(sys.version)
    names = sorted(f"{d.metadata['Name']}=={d.version}" for d in distributions())
    print(", ".join(names))
    spec = find_spec("nvidia")
    for place in spec.submodule_search_locations or [] if spec else []:
        for file in sorted(Path(place).rglob("*.so*")):
            if any(part in file.name for part in ("cublasLt", "cudnn.so", "cudnn_graph", "nvrtc.so", "nvToolsExt")):
                print(file, file.stat().st_size >> 20, "MB")
    import torch

    print(torch.__version__, torch.version.cuda, torch.backends.cudnn.version(), torch.cuda.get_device_name())
    for name in ("torchvision", "transformers", "cupy", "nvtx", "cudnn"):
        try:
            module = __import__(name)
            print(name, getattr(module, "__version__", "?"), getattr(module, "__file__", ""))
        except Exception as error:
            print(name, type(error).__name__, error)


if __name__ == "__main__":
    main()
