"""The frozen base model: loads it, names its servable modules, runs forward and grad_input.

One rule: nothing here knows clients, queues or sockets. The model is frozen and in eval mode; every
operation is a pure function of its inputs. `BaseModel` owns its references to the weights: wrapping
the very model it was made from does not free or change what is served.
"""

from __future__ import annotations

import copy
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from symbiosis.errors import InvalidInputError, UnknownModuleError
from symbiosis.flight import gemm
from symbiosis.flight.fingerprint import model_fingerprint, module_hashes
from symbiosis.flight.protocol import FILE_SUFFIXES, STORED_TAGS, TAGS, ModuleInfo, ParameterInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Linear:
    """A frozen linear. `weight` is [d_out, d_in]; a Conv1D's is a transposed view. `bias` is used in segments only."""

    name: str
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    kind: str = "linear"

    @property
    def d_in(self) -> int:
        return self.weight.shape[1]

    @property
    def d_out(self) -> int:
        return self.weight.shape[0]

    def tensors(self) -> list[torch.Tensor]:
        return [self.weight]


@dataclass(frozen=True)
class Block:
    """A frozen sub-module that maps each token on its own, such as an MLP or a mixture of experts."""

    name: str
    module: nn.Module
    d_in: int
    d_out: int
    kind: str = "block"

    def tensors(self) -> list[torch.Tensor]:
        return [parameter for _, parameter in sorted(self.module.named_parameters())]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[N, d_in] -> [N, d_out]"""
        return self.module(x.unsqueeze(0)).squeeze(0)  # type: ignore[no-any-return]

    def grad_input(self, x: torch.Tensor, grad_output: torch.Tensor) -> torch.Tensor:
        """[N, d_in], [N, d_out] -> [N, d_in]; the forward is computed again: nothing was kept."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (grad_input,) = torch.autograd.grad(self.forward(x), x, grad_output)
        return grad_input


class BaseModel:
    """A transformers model, frozen, as named servable modules and publishable parameters.

    Args:
        model: any transformers model; its parameters are shared, not copied.
        name: shown to clients and recorded in their adapters.
        revision: commit or version of the checkpoint, if it has one.
        tokenizer: published to clients, if given.
        hashes: module hashes computed earlier (see `hashes`), to skip hashing; ignored unless they
            name exactly the modules found.
        progress: wraps the list of module names while they are hashed, such as tqdm.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str = "",
        revision: str = "",
        tokenizer: Any = None,
        hashes: dict[str, dict[str, str]] | None = None,
        progress: Callable[[list[str]], Iterable[str]] = iter,
    ) -> None:
        self.config: Any = model.config
        self.architecture = type(model).__name__
        self.name = name or getattr(self.config, "_name_or_path", "") or self.architecture
        self.revision = revision
        self.tokenizer = tokenizer
        self.generation_config: Any = getattr(model, "generation_config", None)
        frozen = _share_frozen(model)
        gemm.use_in(frozen)
        self._tied = _tied_weights(frozen)
        self.linears = dict(_find_linears(frozen))
        self.blocks = dict(_find_blocks(frozen, self.config))
        self.norms = dict(_find_norms(frozen))
        self.modules: dict[str, Linear | Block] = {**self.linears, **self.blocks, **self.norms}
        self.parameters = dict(_find_parameters(frozen, self))
        weight = next(iter(self.linears.values())).weight if self.linears else next(frozen.parameters())
        self.dtype, self.device = weight.dtype, weight.device
        self.base_bytes = sum({t.data_ptr(): t.nbytes for t in frozen.parameters()}.values())
        if hashes is None or hashes.keys() != self.modules.keys():
            hashes = {name: module_hashes(self.modules[name].tensors()) for name in progress(list(self.modules))}
        self.hashes = hashes

    @property
    def fingerprint(self) -> str:
        tag = TAGS.get(self.dtype, "F32")
        return model_fingerprint({name: hashes[tag] for name, hashes in self.hashes.items()})

    def module_infos(self) -> list[ModuleInfo]:
        return [
            ModuleInfo(
                name=name,
                kind=module.kind,  # type: ignore[arg-type]
                d_in=module.d_in,
                d_out=module.d_out,
                parameters=sum(t.numel() for t in module.tensors()),
                tied=isinstance(module, Linear) and f"{name}.weight" in self._tied,
                hashes=self.hashes[name],
                bias=_bias_hashes(module),
            )
            for name, module in self.modules.items()
        ]

    def parameter_infos(self) -> list[ParameterInfo]:
        return [ParameterInfo(n, STORED_TAGS[t.dtype], list(t.shape)) for n, t in self.parameters.items()]

    def files(self) -> dict[str, bytes]:
        """Tokenizer files and the generation config, by plain file name."""
        found: dict[str, bytes] = {}
        with tempfile.TemporaryDirectory() as folder:
            for part in (self.tokenizer, self.generation_config):
                if part is not None:
                    part.save_pretrained(folder)
            for path in sorted(Path(folder).iterdir()):
                if path.is_file() and path.suffix in FILE_SUFFIXES:
                    found[path.name] = path.read_bytes()
        return found

    def check(self, op: str, modules: Sequence[str], shapes: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Check a request against the modules it names; returns the widths of its input and its output.

        Raises:
            UnknownModuleError: a name that is not served.
            InvalidInputError: modules that cannot share a call, or a tensor of the wrong shape.
        """
        found = [self._module(name) for name in modules]
        d_in, d_out = found[0].d_in, sum(module.d_out for module in found)
        if len(found) > 1 and any(isinstance(m, Block) or m.d_in != d_in for m in found):
            raise InvalidInputError(
                f"modules {', '.join(modules)} cannot share a call: only linears of one input width can"
            )
        if len(set(modules)) != len(found):
            raise InvalidInputError(f"modules {', '.join(modules)}: a module is named twice")
        expected = self._widths(op, found[0], d_in, d_out)
        rows = shapes[0][0]
        wanted = [[rows, width] for width in expected]
        if [list(shape) for shape in shapes] != wanted:
            raise InvalidInputError(
                f"{op} of {', '.join(modules)} got tensors of shape {[list(s) for s in shapes]}, "
                f"expected {wanted} (rows are tokens)"
            )
        return (d_in, d_out) if op == "forward" else (d_out, d_in)

    def run(self, op: str, modules: Sequence[str], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One operation on checked inputs; [N, ...] in the base's dtype, on its device."""
        first = self.modules[modules[0]]
        if isinstance(first, Block):
            return first.forward(*tensors) if op == "forward" else first.grad_input(*tensors)
        weights = [self.linears[name].weight for name in modules]
        return gemm.forward(tensors[0], weights) if op == "forward" else gemm.grad_input(tensors[0], weights)

    def _module(self, name: str) -> Linear | Block:
        module = self.modules.get(name)
        if module is None:
            raise UnknownModuleError(
                f"this server ({self.name}, {len(self.modules)} modules) does not serve {name!r}; "
                "connection.manifest.modules lists the names"
            )
        return module

    @staticmethod
    def _widths(op: str, first: Linear | Block, d_in: int, d_out: int) -> list[int]:
        if op == "forward":
            return [d_in]
        return [d_in, d_out] if isinstance(first, Block) else [d_out]


def _share_frozen(model: nn.Module) -> nn.Module:
    """A copy of the module tree over the same weights, frozen and in eval mode.

    The tree is copied because a client in this process may wrap `model` itself, which swaps its
    modules for ones that call this server.
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach()
    memo[id(model.config)] = model.config
    return copy.deepcopy(model, memo).eval()


def _tied_weights(model: nn.Module) -> set[str]:
    """Names of linear weights that are also an embedding's."""
    embeddings = {m.weight.data_ptr() for m in model.modules() if isinstance(m, nn.Embedding)}
    return {
        f"{name}.weight"
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and m.weight.data_ptr() in embeddings
    }


def _find_linears(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    for name, module in model.named_modules():
        # Exact types: a subclass may compute something else, and is left to blocks or to the client.
        if type(module) is nn.Linear:
            yield name, Linear(name, module.weight.detach(), _detached(module.bias))
        elif type(module) is Conv1D:
            yield name, Linear(name, module.weight.detach().t(), _detached(module.bias), kind="conv1d")


def _bias_hashes(module: Linear | Block) -> dict[str, str]:
    bias = module.bias if isinstance(module, Linear) else None
    return {} if bias is None else module_hashes([bias])


def _detached(bias: torch.Tensor | None) -> torch.Tensor | None:
    return None if bias is None else bias.detach()


def _find_norms(model: nn.Module) -> Iterator[tuple[str, Block]]:
    """Leaves whose parameters are vectors of one width and that treat each token on its own."""
    verdicts: dict[tuple[type, int], int] = {}
    for name, module in model.named_modules():
        parameters = list(module.parameters())
        if not parameters or next(module.children(), None) or any(p.dim() != 1 for p in parameters):
            continue
        kind = (type(module), parameters[0].shape[0])
        if kind not in verdicts:
            verdicts[kind] = _probe(module, kind[1])
        if verdicts[kind] == kind[1]:
            yield name, Block(name, module, kind[1], kind[1], kind="norm")


def _find_blocks(model: nn.Module, config: Any) -> Iterator[tuple[str, Block]]:
    """The outermost sub-modules that hold linears or experts and treat each token on its own."""
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    width = getattr(text_config, "hidden_size", None)
    if not isinstance(width, int):
        return
    verdicts: dict[type, int] = {}  # class -> output width, 0 if it cannot be served
    pending = list(model.named_children())
    while pending:
        name, module = pending.pop(0)
        if _holds_weights(module) and not isinstance(module, (nn.ModuleList, nn.Sequential)):
            kind = type(module)
            if kind not in verdicts:
                verdicts[kind] = _probe(module, width)
            if verdicts[kind]:
                yield name, Block(name, module, width, verdicts[kind])
                continue
        pending.extend((f"{name}.{child_name}", child) for child_name, child in module.named_children())


def _holds_weights(module: nn.Module) -> bool:
    """Worth a call: at least two matrices, in linears or of its own, and no embedding."""
    if isinstance(module, (nn.Linear, Conv1D, nn.Embedding)):
        return False
    if any(isinstance(child, nn.Embedding) for child in module.modules()):
        return False
    return sum(parameter.dim() >= 2 for parameter in module.parameters()) >= 2


def _probe(module: nn.Module, width: int) -> int:
    """The output width of a block that maps [1, N, width] token by token; 0 if it does not.

    A token's output must have a gradient of exactly zero towards every other token. Comparing values
    instead would let weak attention pass, and permuting tokens would let all of BERT's pass.
    """
    weight = next(module.parameters())
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 4, width, generator=generator).to(weight.device, weight.dtype).requires_grad_()
    try:
        with torch.enable_grad():
            y = module(x)
            return int(y.shape[2]) if y.shape[:2] == x.shape[:2] and _tokens_apart(x, y) else 0
    except Exception:  # any complaint means: not a function of one activation tensor
        return 0


def _tokens_apart(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the first and the last token of y [1, N, d] depend on no other token of x."""
    for token in (0, x.shape[1] - 1):
        (grad,) = torch.autograd.grad(y[:, token].float().pow(2).sum(), x, retain_graph=True)
        others = [i for i in range(x.shape[1]) if i != token]
        if grad[:, others].count_nonzero():
            return False
    return True


def _find_parameters(model: nn.Module, base: BaseModel) -> Iterator[tuple[str, torch.Tensor]]:
    """What a client may hold: every persistent tensor but the weights that are served.

    A tied tensor is published once, under its first name. What a block holds beside linears
    (experts, routers) can only be used as a block, and stays.
    """
    held_back = {f"{name}.weight" for name in base.linears}
    for name, block in base.blocks.items():
        held_back |= {f"{name}.{key}" for key in _own_parameters(block.module)}
    seen: set[tuple[int, int]] = set()
    for name, tensor in model.state_dict().items():
        storage = (tensor.data_ptr(), tensor.numel())
        if name in held_back or (tensor.numel() and storage in seen):
            continue
        seen.add(storage)
        yield name, tensor.detach()


def _own_parameters(module: nn.Module) -> set[str]:
    """Names of the parameters in a block that belong to no linear."""
    names = {key for key, _ in module.named_parameters()}
    for linear_name, linear in module.named_modules():
        if type(linear) in (nn.Linear, Conv1D):
            names -= {f"{linear_name}.{key}" for key, _ in linear.named_parameters()}
    return names
