"""What of a frozen model can be served: linears, experts, blocks and norms, found by trying them out.

    linear    x Wᵀ                                        nn.Linear, Conv1D, and what gives the same as nn.Linear
    experts   of x and a weight for each expert           matrices of many experts, and no router
    block     a function of one token                     an MLP, a mixture of experts with its router
    norm      the same, without matrices                  RMSNorm, LayerNorm, and any other leaf like them

One rule: nothing is known by its name. What a module computes is asked of the module, with random tokens; what
cannot be found out that way is left to the client.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from symbiosis.flight.protocol import TAGS
from symbiosis.flight.quantized import Weight

PROBE_TOKENS = 4


@dataclass(frozen=True)
class Linear:
    """A frozen linear. `weight` is [d_out, d_in]; a Conv1D's is a transposed view. `bias` is used in segments only."""

    name: str
    weight: Weight
    bias: torch.Tensor | None = None
    kind: str = "linear"

    @property
    def d_in(self) -> int:
        return self.weight.shape[1]

    @property
    def d_out(self) -> int:
        return self.weight.shape[0]

    @property
    def parameters(self) -> int:
        return self.weight.numel()

    def tensors(self) -> list[torch.Tensor]:
        assert isinstance(self.weight, torch.Tensor), "hashes are of the values before they are quantised"
        return [self.weight]


@dataclass(frozen=True)
class Block:
    """A frozen sub-module that maps each token on its own, such as an MLP or a mixture of experts."""

    name: str
    module: nn.Module
    d_in: int
    d_out: int
    kind: str = "block"

    @property
    def parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        named = sorted(self.module.named_parameters(remove_duplicate=False))
        return list({id(parameter): parameter for _, parameter in named}.values())  # once each, whatever its names

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, d_in] -> [N, d_out]"""
        return self.module(x.unsqueeze(0)).squeeze(0)  # type: ignore[no-any-return]

    def grad_input(self, x: torch.Tensor, grad_output: torch.Tensor) -> torch.Tensor:
        """[N, d_in], [N, d_out] -> [N, d_in]; the forward is computed again: nothing was kept."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (grad_input,) = torch.autograd.grad(self.forward(x), x, grad_output)
        return grad_input


@dataclass(frozen=True)
class Experts(Block):
    """Experts without their router: a token comes with a weight for each of them, zero for most."""

    kind: str = "experts"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, d + number of experts] -> [N, d]"""
        tokens, dense = x.split([self.d_out, self.d_in - self.d_out], dim=1)
        chosen = max(1, int((dense != 0).sum(dim=1).max())) if len(dense) else 1
        index = dense.detach().abs().topk(chosen, dim=1).indices  # [N, chosen]
        return self.module(tokens, index, dense.gather(1, index))  # type: ignore[no-any-return]


def find_linears(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Linears by name. Those that hang in several places are named once."""
    verdicts: dict[type, bool] = {nn.Linear: True}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and type(module) not in verdicts:
            verdicts[type(module)] = _multiplies(module)
        if type(module) is Conv1D or verdicts.get(type(module)):
            yield name, linear_of(name, module)


def linear_of(name: str, module: Any) -> Linear:
    """An nn.Linear or a Conv1D as the tensors that it has now."""
    bias = None if module.bias is None else module.bias.detach()
    if type(module) is Conv1D:
        return Linear(name, module.weight.detach().t(), bias, kind="conv1d")
    return Linear(name, module.weight.detach(), bias)


def find_experts(model: nn.Module, width: int | None) -> Iterator[tuple[str, Experts]]:
    """Modules that own matrices of experts and take (tokens, index of experts, their weights)."""
    verdicts: dict[tuple[Any, ...], bool] = {}
    for name, module in model.named_modules():
        counts = {p.shape[0] for p in module._parameters.values() if p is not None and p.dim() == 3}
        if width is None or len(counts) != 1 or next(iter(counts)) < 2 or _arguments(module) != 3:
            continue
        experts = Experts(name, module, width + counts.pop(), width)
        if (kind := _kind(module, width)) not in verdicts:
            verdicts[kind] = _output_width(experts.forward, module, experts.d_in, flat=True) == width
        if verdicts[kind]:
            yield name, experts


def find_norms(model: nn.Module, width: int | None) -> Iterator[tuple[str, Block]]:
    """Leaves whose parameters are vectors of one width, if they have any, and that treat each token on its own."""
    verdicts: dict[tuple[Any, ...], bool] = {}
    for name, module in model.named_modules():
        parameters = list(module.parameters())
        if next(module.children(), None) or any(p.dim() != 1 for p in parameters):
            continue
        # Without parameters nothing tells the width of a norm, nor a norm from an activation but its name.
        own = parameters[0].shape[0] if parameters else width if "norm" in type(module).__name__.lower() else None
        if own is None:
            continue
        if (kind := _kind(module, own)) not in verdicts:
            verdicts[kind] = _output_width(module, module, own) == own
        if verdicts[kind]:
            yield name, Block(name, module, own, own, kind="norm")


def find_blocks(model: nn.Module, width: int | None, tied: set[str]) -> Iterator[tuple[str, Block]]:
    """The outermost sub-modules that hold linears or experts and treat each token on its own.

    Args:
        model: the base model.
        width: of its tokens, for modules whose first matrix does not tell.
        tied: names of weights that are an embedding's; the clients' own, and as wide as the vocabulary.
    """
    verdicts: dict[tuple[Any, ...], int] = {}  # output width, 0 if it cannot be served
    pending = list(model.named_children())
    while pending:
        name, module = pending.pop(0)
        if _holds_weights(module) and not any(weight.startswith(f"{name}.") for weight in tied):
            for d_in in dict.fromkeys(filter(None, (_first_width(module), width))):
                if (kind := _kind(module, d_in)) not in verdicts:
                    verdicts[kind] = _output_width(module, module, d_in)
                if verdicts[kind]:
                    yield name, Block(name, module, d_in, verdicts[kind])
                    break
            else:
                pending.extend((f"{name}.{child_name}", child) for child_name, child in module.named_children())
            continue
        pending.extend((f"{name}.{child_name}", child) for child_name, child in module.named_children())


def tied_weights(model: nn.Module) -> set[str]:
    """Names of linear weights that are also an embedding's."""
    embeddings = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    return {
        f"{name}.weight"
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and m.weight.data_ptr() in embeddings
    }


def token_width(config: Any) -> int | None:
    """How wide the residual stream of a model is, where its config says so."""
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    width = getattr(text_config, "hidden_size", None)
    return width if isinstance(width, int) else None


def _kind(module: nn.Module, width: int) -> tuple[Any, ...]:
    """Modules of one kind get one verdict: those of one class with parameters of the same shapes."""
    return (type(module), width, *(parameter.shape for parameter in module.parameters()))


def _holds_weights(module: nn.Module) -> bool:
    """Worth a call: at least two matrices, in linears or of its own, and no embedding."""
    if isinstance(module, (nn.Linear, Conv1D, nn.Embedding, nn.ModuleList, nn.Sequential)):
        return False
    if any(isinstance(child, nn.Embedding) for child in module.modules()):
        return False
    return sum(parameter.dim() >= 2 for parameter in module.parameters()) >= 2


def _first_width(module: nn.Module) -> int | None:
    """d_in of its first linear, which is most often the first that it uses."""
    for child in module.modules():
        if isinstance(child, nn.Linear):
            return child.in_features
        if isinstance(child, Conv1D):
            return int(child.nx)
    return None


def _arguments(module: nn.Module) -> int:
    parameters = inspect.signature(module.forward).parameters.values()
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)


# --- trying out -------------------------------------------------------------------------------------


def _tokens(module: nn.Module, width: int) -> torch.Tensor:
    """The same random tokens each time, [PROBE_TOKENS, width]."""
    weight = next(module.parameters(), torch.empty(0))
    tokens = torch.randn(PROBE_TOKENS, width, generator=torch.Generator().manual_seed(0))
    return tokens.to(weight.device, weight.dtype)


def _multiplies(module: nn.Linear) -> bool:
    """Whether a subclass of nn.Linear computes what nn.Linear does: to the bit, since it is the same product."""
    if module.weight.dtype not in TAGS or module.weight.shape != (module.out_features, module.in_features):
        return False
    x = _tokens(module, module.in_features)
    try:
        with torch.no_grad():
            return torch.allclose(module(x), nn.functional.linear(x, module.weight, module.bias))
    except Exception:  # any complaint means: it is something else
        return False


def _output_width(forward: Any, module: nn.Module, width: int, *, flat: bool = False) -> int:
    """The output width of what maps tokens [1, N, width], or [N, width], one by one; 0 if it does not.

    A token's output must have a gradient of exactly zero towards every other token. Comparing values
    instead would let weak attention pass, and permuting tokens would let all of BERT's pass. It must
    also be the same wherever the token stands, among however many.
    """
    x = _tokens(module, width).requires_grad_()

    def run(tokens: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = forward(tokens if flat else tokens.unsqueeze(0))
        if y.shape[: y.dim() - 1] != ((len(tokens),) if flat else (1, len(tokens))):
            raise ValueError("not a row for each token")
        return y if flat else y.squeeze(0)

    try:
        with torch.enable_grad():
            y = run(x)
            return int(y.shape[1]) if _tokens_apart(x, y) and _same(run(x[1:3]), y[1:3]) else 0
    except Exception:  # any complaint means: not a function of one activation tensor
        return 0


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() <= 1e-2 * b.abs().max())  # of bfloat16 and another order of sums, too


def _tokens_apart(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the first and the last token of y [N, d] depend on no other token of x."""
    for token in (0, len(x) - 1):
        (grad,) = torch.autograd.grad(y[token].float().pow(2).sum(), x, retain_graph=True)
        others = [i for i in range(len(x)) if i != token]
        if grad[others].count_nonzero():
            return False
    return True
