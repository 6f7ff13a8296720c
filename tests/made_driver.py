# SPDX-License-Identifier: Apache-2.0
"""A driver of triton for an NVIDIA GPU that is not there: what kernels are launched through in tests without a GPU."""

import torch
from triton.backends.compiler import GPUTarget


class MadeDriver:
    """Kernels are compiled for `arch`; what a launch does is up to `launcher_cls`, which subclasses define."""

    arch: int
    shared: int  # bytes of shared memory of a program
    processors: int

    class utils:
        @staticmethod
        def load_binary(*_):
            return 0, 0, 0, 0, 1024

    def __init__(self):
        properties = {"max_shared_mem": self.shared, "multiprocessor_count": self.processors}
        self.utils = self.utils()
        self.utils.get_device_properties = lambda device: properties | {"max_num_regs": 65536, "warpSize": 32}

    def get_current_target(self):
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_device_interface(self):
        return torch.cuda
