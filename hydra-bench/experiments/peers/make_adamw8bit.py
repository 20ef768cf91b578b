"""Writes `hydra-core/tests/fixtures/adamw8bit.bin`: the maps of bitsandbytes and a parameter that its AdamW8bit stepped.

Usage: make_adamw8bit.py OUT. Needs torch, triton and bitsandbytes (0.50.2).

The file has little-endian `f32` and bytes: the signed and the unsigned map; then after 1 and after 100 steps the parameter, the
codes and scales of its first moment, and those of its second moment. The steps are those of bitsandbytes' reference in torch
(`optimizer_update_8bit_blockwise_pytorch`), whose codes are the nearest ones. The gradients are a function of the step and the
element that the test computes too.
"""

import sys

import numpy as np
import torch
from bitsandbytes import functional
from bitsandbytes.backends.triton.kernels_optim import optimizer_update_8bit_blockwise_pytorch

ELEMENTS, BLOCK, STEPS, SHOWN = 4133, 256, 100, (1, 100)
# Of elements within a block, and of blocks.
WITHIN = np.array([1.0, 0.5, 0.125, 0.0625], dtype=np.float32)
BLOCKS = np.array([1.0, 0.1, 0.01, 1e-3, 1e-4, 1e-6], dtype=np.float32)


def mix(x):
    x ^= x >> 15
    x = x * 0x2C1B3CE5 & 0xFFFFFFFF
    x ^= x >> 12
    x = x * 0x297A2D39 & 0xFFFFFFFF
    return x ^ x >> 15


def gradient(step):
    i = np.arange(ELEMENTS, dtype=np.uint64)
    x = mix((np.uint64(step * 0x9E3779B1 & 0xFFFFFFFF) ^ (i * 0x85EBCA77 & 0xFFFFFFFF)) & 0xFFFFFFFF)
    uniform = (x >> 8).astype(np.float32) / np.float32(1 << 24) - np.float32(0.5)
    drift = np.float32(0.25) * ((i % 3).astype(np.float32) - np.float32(1.0))
    gradient = (uniform + drift) * WITHIN[(i % 4).astype(int)] * BLOCKS[(i // BLOCK % 6).astype(int)]
    gradient[i % 11 == 0] = 0.0
    gradient[(i >= 512) & (i < 768)] = 0.0
    return torch.from_numpy(gradient)


def main(out):
    maps = [functional.create_dynamic_map(signed=signed) for signed in (True, False)]
    blocks = -(-ELEMENTS // BLOCK)
    param = torch.from_numpy((np.arange(ELEMENTS) % 17).astype(np.float32) / np.float32(8) - np.float32(1))
    codes = [torch.zeros(ELEMENTS, dtype=torch.uint8) for _ in maps]
    scales = [torch.zeros(blocks) for _ in maps]
    content = [code.numpy().astype("<f4").tobytes() for code in maps]
    for step in range(1, STEPS + 1):
        optimizer_update_8bit_blockwise_pytorch(
            param, gradient(step - 1), *codes, 0.9, 0.999, 0.0, 0.0, 1e-8, step, 1e-2, *maps, *scales, 0.01, 1.0, False,
            optimizer_name="adam",
        )  # fmt: skip
        if step in SHOWN:
            content.append(param.numpy().astype("<f4").tobytes())
            for code, scale in zip(codes, scales):
                content += [code.numpy().tobytes(), scale.numpy().astype("<f4").tobytes()]
    with open(out, "wb") as file:
        file.write(b"".join(content))


main(sys.argv[1])
