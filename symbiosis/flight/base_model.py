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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from symbiosis.errors import ConfigError, InvalidInputError, UnknownModuleError
from symbiosis.flight import gemm, ring
from symbiosis.flight.fingerprint import model_fingerprint, module_hashes, served_fingerprint
from symbiosis.flight.packed import Packed, check_can_pack
from symbiosis.flight.protocol import FILE_SUFFIXES, STORED_TAGS, TAGS, ModuleInfo, ParameterInfo
from symbiosis.flight.quantized import Quantized, Width, hide_weight, nbytes, quantize
from symbiosis.flight.servable import (
    Block,
    Linear,
    find_blocks,
    find_experts,
    find_linears,
    find_norms,
    linear_of,
    tied_weights,
    token_width,
)

__all__ = ["BaseModel", "Block", "Linear"]

logger = logging.getLogger(__name__)


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
        quantized: linears are kept in so many bits once they are hashed: all but an output head and what is tied to
            an embedding. None is as they come.
        prepack: the same linears are laid out for products once they are hashed (see packed.py); not with `quantized`.
        device: where a quantised or laid out model is moved, one linear at a time; None is where it is.

    Raises:
        ConfigError: nothing of this model can be quantised or laid out, or something in it reads weights of linears
            itself; both were asked for.
        MissingExtraError: int4 without bitsandbytes.
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
        quantized: Width | None = None,
        prepack: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.config: Any = model.config
        self._files: dict[str, bytes] | None = None
        self.architecture = type(model).__name__
        self.name = name or getattr(self.config, "_name_or_path", "") or self.architecture
        self.revision = revision
        self.tokenizer = tokenizer
        self.generation_config: Any = getattr(model, "generation_config", None)
        frozen = _share_frozen(model)
        width = token_width(self.config)
        self._tied = tied_weights(frozen)
        self.linears = dict(find_linears(frozen))
        for linear_name, linear in self.linears.items():
            gemm.use_in(frozen.get_submodule(linear_name), linear.weight)
        self.experts = dict(find_experts(frozen, width))
        self.blocks = dict(find_blocks(frozen, width, self._tied))
        self.norms = dict(find_norms(frozen, width))
        self.modules: dict[str, Linear | Block] = {**self.linears, **self.experts, **self.blocks, **self.norms}
        if hashes is None or hashes.keys() != self.modules.keys():
            hashes = {name: module_hashes(self.modules[name].tensors()) for name in progress(list(self.modules))}
        self.hashes = hashes
        self.quantized: Width | None = quantized
        held = 0
        if quantized and prepack:
            raise ConfigError(f"quantize={quantized} and prepack: quantised weights are not laid out anew; take one")
        if quantized:
            held = self._keep_as(lambda w: quantize(w, quantized), f"quantize={quantized}", frozen, device)
        elif prepack:
            for whole in (linear.tensors()[0] for linear in self.linears.values()):
                check_can_pack(whole.dtype, device or whole.device)
            held = self._keep_as(Packed.of, "prepack", frozen, device)
        self.parameters = dict(_find_parameters(frozen, self))
        self._exponents: dict[str, int] = {}
        self._weight_norms: dict[str, torch.Tensor] = {}  # filled when first asked for
        weight = next(iter(self.linears.values())).weight if self.linears else next(frozen.parameters())
        self.dtype, self.device = weight.dtype, weight.device
        self.base_bytes = held + sum({t.data_ptr(): nbytes(t) for t in frozen.parameters()}.values())

    def _keep_as(
        self, kept: Callable[[torch.Tensor], Quantized], option: str, frozen: nn.Module, device: torch.device | None
    ) -> int:
        """Keep weights in another form; their bytes. To be called once they are hashed: clients hash a checkpoint's."""
        head_of: Any = getattr(frozen, "get_output_embeddings", lambda: None)
        head = head_of()
        layers = {name: frozen.get_submodule(name) for name in self.linears}
        chosen = [name for name, layer in layers.items() if layer is not head and f"{name}.weight" not in self._tied]
        if not chosen:
            raise ConfigError(f"{option}: {self.architecture} has no linear for it; leave the option out")
        small = {}
        for name in chosen:
            whole = self.linears[name].tensors()[0]
            small[name] = kept(whole.to(device or whole.device))
            hide_weight(layers[name], device or whole.device)
        if device is not None:
            frozen.to(device)
        for name, layer in layers.items():
            linear = linear_of(name, layer)
            self.linears[name] = replace(linear, weight=small.get(name, linear.weight))
            gemm.use_in(layer, self.linears[name].weight)
        self.modules.update(self.linears)
        if lost := self.blocks.keys() - dict(find_blocks(frozen, token_width(self.config), self._tied)).keys():
            raise ConfigError(
                f"{option}: {min(lost)} of {self.architecture} reads the weights of its linears itself, and "
                "would find none; leave the option out"
            )
        return sum(weight.nbytes for weight in small.values())

    @property
    def served_fingerprint(self) -> str:
        """Equal where results are: the fingerprint, and how weights are kept."""
        return served_fingerprint(self.fingerprint, self.quantized or "")

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
                parameters=module.parameters,
                tied=isinstance(module, Linear) and f"{name}.weight" in self._tied,
                hashes=self.hashes[name],
                bias=_bias_hashes(module),
            )
            for name, module in self.modules.items()
        ]

    def parameter_infos(self) -> list[ParameterInfo]:
        return [ParameterInfo(n, STORED_TAGS[t.dtype], list(t.shape)) for n, t in self.parameters.items()]

    def weight_norms(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Of each linear, the Euclidean norms of its columns [d_in] and then of its rows [d_out], in float32."""
        for name, linear in self.linears.items():
            if name not in self._weight_norms:
                values = linear.weight.to(torch.float32)
                both = [torch.linalg.vector_norm(values, dim=dim) for dim in (0, 1)]
                self._weight_norms[name] = torch.cat(both).to("cpu")
            yield name, self._weight_norms[name]

    def files(self) -> dict[str, bytes]:
        """Tokenizer files and the generation config, by plain file name.

        Raises:
            ConfigError: there is no room for them in the folder for temporary files.
        """
        try:
            if self._files is None:  # kept: the disk may be full by the time that somebody connects
                self._files = self._written_files()
            return self._files
        except OSError as error:
            where = tempfile.gettempdir()
            raise ConfigError(
                f"the tokenizer's files cannot be written to {where}, from where they are read to be published: "
                f"{error.strerror}; make room there, or set TMPDIR to another folder"
            ) from error

    def _written_files(self) -> dict[str, bytes]:
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
        if tensors[0].dtype == torch.int64:
            product = ring.forward if op == "forward" else ring.grad_input
            return product(tensors[0], weights, self.exponents(modules))
        return gemm.forward(tensors[0], weights) if op == "forward" else gemm.grad_input(tensors[0], weights)

    def exponents(self, modules: Sequence[str]) -> list[int]:
        """Of each linear, the power of two that makes its weight whole numbers (see ring.py); checked when first asked.

        Raises:
            InvalidInputError: a base that is quantised, a weight without an integer form.
            RemoteComputeError: a device whose double precision is not exact.
        """
        if self.quantized:
            raise InvalidInputError(
                f"this base is kept in {self.quantized}, whose values may differ in their last bits between machines; "
                "integers are for a base that is not quantised"
            )
        if not self._exponents:
            ring.check_device(self.device)
        for name in modules:
            if name not in self._exponents:
                self._exponents[name] = ring.exponent_of(self.linears[name].weight)
        return [self._exponents[name] for name in modules]

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


def _bias_hashes(module: Linear | Block) -> dict[str, str]:
    bias = module.bias if isinstance(module, Linear) else None
    return {} if bias is None else module_hashes([bias])


def _find_parameters(model: nn.Module, base: BaseModel) -> Iterator[tuple[str, torch.Tensor]]:
    """What a client may hold: every persistent tensor but the weights that are served.

    A tied tensor is published once, under its first name. What a block holds beside linears and experts can
    only be used as a block, and stays, unless a client can compute the block from them: then it is a router,
    whose logits the client may want.
    """
    held_back = {f"{name}.weight" for name in base.linears}
    for name, block in (*base.experts.items(), *base.blocks.items()):
        if not any(inner.startswith(f"{name}.") for inner in base.experts):
            held_back |= {f"{name}.{key}" for key, p in block.module.named_parameters() if p.dim() >= 2}
    seen: set[tuple[int, int]] = set()
    for name, tensor in model.state_dict().items():
        storage = (tensor.data_ptr(), tensor.numel())
        if name in held_back or (tensor.numel() and storage in seen):
            continue
        seen.add(storage)
        yield name, tensor.detach()
