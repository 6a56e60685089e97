"""The end of torchvision's `extension.py`, where `make test-vision` installs it.

The processors of models that see want what torchvision has in Python. Its library of
operators does not load beside the CPU build of torch, and then it cannot be imported,
because it describes two operators that nobody has declared. They are declared here, in
every process that imports it: vLLM looks at a model's class in one of its own.
"""

import torch

if not hasattr(torch.ops.torchvision, "nms"):
    schema = "(Tensor dets, Tensor scores, float iou) -> Tensor"
    for operator in "nms", "qnms":
        torch.library.define(f"torchvision::{operator}", schema)
