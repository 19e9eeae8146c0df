"""Every test here runs with `second:1` as the main thread's current device, as on rank 1 of two."""

import second_device
import torch

second_device.install()
torch.accelerator.set_device_index(1)
