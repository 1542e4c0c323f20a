"""Products with frozen weights, whatever the machine multiplies natively."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from symbiosis.flight import gemm

WIDTHS = (24, 8, 40)
# float32: sums of 32 products in another order. The others: one rounding of the result, 2^-8 and 2^-11.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@pytest.fixture(params=[True, False], ids=["native", "not native"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(gemm, "multiplies_natively", lambda dtype, device: request.param or dtype == torch.float32)
    return bool(request.param)


def weights(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(width, 32, generator=generator).to(dtype) for width in WIDTHS]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("tokens", [0, 1, gemm.FEW_TOKENS, gemm.FEW_TOKENS + 1, 33])
def test_forward_and_grad_input_are_those_of_the_linears(tokens: int, dtype: torch.dtype) -> None:
    w, x = weights(dtype), torch.randn(tokens, 32).to(dtype)
    grad = torch.randn(tokens, sum(WIDTHS)).to(dtype)

    y, dx = gemm.forward(x, w), gemm.grad_input(grad, w)

    whole = torch.cat(w).double()
    assert y.dtype == dx.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(y.double(), x.double() @ whole.t(), rtol=tolerance, atol=tolerance * 8)
    torch.testing.assert_close(dx.double(), grad.double() @ whole, rtol=tolerance, atol=tolerance * 8)


@pytest.mark.usefixtures("native")
def test_a_block_keeps_its_gradient_and_its_weights_get_none() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16, bias=False)).to(torch.bfloat16)
    block.requires_grad_(False)
    x = torch.randn(1, 9, 16, dtype=torch.bfloat16, requires_grad=True)
    expected = torch.autograd.grad(block.float()(x.float()).sum(), x)[0]
    block.to(torch.bfloat16)

    for layer in (block[0], block[2]):
        gemm.use_in(layer, layer.weight)
    (got,) = torch.autograd.grad(block(x).sum(), x)

    torch.testing.assert_close(got.float(), expected.float(), rtol=5e-2, atol=5e-2)


def test_float32_is_native_everywhere() -> None:
    assert gemm.multiplies_natively(torch.float32, torch.device("cpu"))
    assert gemm.multiplies_natively(torch.bfloat16, torch.device("cuda"))
