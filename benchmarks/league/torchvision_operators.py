"""Imports torchvision where its compiled operators do not load.

The builds on PyPI are made for CUDA. Beside a CPU build of PyTorch their library is left out, and the Python
code then fails to describe operators that do not exist. The peers import torchvision and need none of them.
"""

import sys

import torch

ARGUMENTS = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"  # of nms, also of quantised boxes


def define_missing_operators() -> None:
    try:
        import torchvision  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:  # then nothing in this environment asks for it
        return
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")
        library.define("nms" + ARGUMENTS)
        library.define("qnms" + ARGUMENTS)
        _LIBRARIES.append(library)
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]


_LIBRARIES: list[torch.library.Library] = []  # a library that is collected takes its operators with it
