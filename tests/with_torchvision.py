"""A plugin of pytest: torchvision, whose build on PyPI is for CUDA, can be imported on a CPU."""

import torch

library = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms") if torch.version.cuda is None else ():  # which no test calls
    library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
