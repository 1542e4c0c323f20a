"""Number types of the base, for the compatibility table: wide, narrow and in fewer bits."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from tests.client.conftest import quantized_locally
from tests.conformance.harness import Build, Section
from tests.conformance.loops import plain
from tests.conformance.training import BITS8, BITS11, Training, llama


def base_in(dtype: torch.dtype) -> Build:
    """The base in this type; peft keeps its adapter in float32."""

    def build() -> nn.Module:
        return llama().to(dtype)

    return build


in_bfloat16, in_float16 = base_in(torch.bfloat16), base_in(torch.float16)


DTYPES: tuple[Training, ...] = (
    Training("float32 base", loop=plain),
    Training("bfloat16 base, adapter in float32", loop=plain, build=in_bfloat16, tolerance=1e-2, note=BITS8),
    Training("float16 base, adapter in float32", loop=plain, build=in_float16, tolerance=5e-3, note=BITS11),
    Training(
        "int8 base (`--quantize int8`)",
        loop=plain,
        served={"quantize": "int8"},
        reference=partial(quantized_locally, width="int8"),
        note="the local model has the same integers and scales",
    ),
    Training(
        "int4 base (`--quantize int4`)",
        loop=plain,
        served={"quantize": "int4"},
        reference=partial(quantized_locally, width="int4"),
        needs="bitsandbytes",
        note="NF4 by bitsandbytes, the same values locally",
    ),
)

SECTIONS = (Section("Training: number types of the base", DTYPES),)
