"""HollowWeight: stands where a base weight stood, shows what it was, and holds nothing.

One rule: whatever only looks (dtype, device, shape as DeepSpeed shows it, `.to()`) works; whatever
would read values or train them raises UnsupportedMethodError, and names the method that asked. Without
the trap DoRA, PiSSA or a merge would fail on a shape, or worse, go on with nothing.

Rejected: a full-shape expanded tensor (`.to()` would materialise it, and reading it would be silently
wrong) and a meta tensor (it breaks `.to()` and Trainer, and pulls new adapters onto meta).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from symbiosis.errors import UnsupportedMethodError

# Functions that look at a tensor, or move or copy it as a whole, without computing on its values.
HARMLESS = frozenset(
    [
        "to",
        "detach",
        "cpu",
        "cuda",
        "float",
        "half",
        "bfloat16",
        "double",
        "type",
        "type_as",
        "requires_grad_",
        "is_floating_point",
        "is_complex",
        "numel",
        "size",
        "dim",
        "ndimension",
        "element_size",
        "nelement",
        "stride",
        "storage_offset",
        "is_contiguous",
        "contiguous",
        "data_ptr",
        "untyped_storage",
        "storage",
        "is_inference",
        "is_pinned",
        "pin_memory",
        "share_memory_",
        "is_shared",
        "get_device",
        "is_set_to",
        "is_signed",
        "__hash__",
        "__repr__",
        "__len__",
        "__deepcopy__",
        "__reduce_ex__",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "retain_grad",
        "has_names",
        "_has_compatible_shallow_copy_type",
        "is_same_size",
        "__format__",
        "__dir__",
        "empty_like",
        "zeros_like",
        "new_empty",
        "new_zeros",
        "new_tensor",
        "set_",
        "__bool__",
    ]
)
VALUE_PROPERTIES = frozenset(("T", "mT", "H", "mH", "real", "imag"))

# What to do instead, by a word in the name of the peft function that asked.
ADVICE = {
    "dora": ("DoRA", "use LoRA or rsLoRA (use_dora=False)"),
    "pissa": ("PiSSA initialisation", "use init_lora_weights=True or 'gaussian'"),
    "olora": ("OLoRA initialisation", "use init_lora_weights=True or 'gaussian'"),
    "loftq": ("LoftQ initialisation", "use init_lora_weights=True or 'gaussian'"),
    "corda": ("CorDA initialisation", "use init_lora_weights=True or 'gaussian'"),
    "lora_ga": ("LoRA-GA initialisation", "use init_lora_weights=True or 'gaussian'"),
    "unmerge": ("unmerging adapters", "keep the adapter apart; nothing was merged here"),
    "merge": (
        "merging adapters into the base",
        "save the adapter with save_pretrained() and merge it where the base weights are, with plain peft",
    ),
}


class HollowWeight(nn.Parameter):
    """A frozen parameter without elements.

    Attributes:
        ds_shape, ds_numel: the shape and size that it stands for, under the names by which peft reads
            the true shape of DeepSpeed's partitioned parameters.
        module_name: the base module it belongs to.
        frozen: whether somebody asked for it not to be trained, as peft does; it never is.
    """

    ds_shape: torch.Size
    module_name: str
    frozen: bool

    def __new__(
        cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu", module_name: str = ""
    ) -> HollowWeight:
        empty = torch.empty((0,) * len(shape), dtype=dtype, device=device)
        weight: HollowWeight = torch.Tensor._make_subclass(cls, empty, False)
        weight.ds_shape = torch.Size(shape)
        weight.module_name = module_name
        weight.frozen = False
        return weight

    @property
    def ds_numel(self) -> int:
        # peft asks this where it counts parameters, and in one place to gather a DeepSpeed parameter and
        # train a copy of it; the import of deepspeed that follows there would fail with another reason.
        if sys._getframe(1).f_code.co_filename.endswith(("peft/utils/other.py", "peft\\utils\\other.py")):
            raise UnsupportedMethodError(
                f"modules_to_save asks for a trainable copy of {self.module_name}, whose base weight stays on the "
                f"server. Instead, train an adapter on it, or wrap a model that has its weights with wrap(local=[...])"
            )
        return self.ds_shape.numel()

    def __deepcopy__(self, memo: dict[int, Any]) -> HollowWeight:
        copied = HollowWeight(self.ds_shape, self.dtype, self.device, self.module_name)
        copied.frozen = self.frozen
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return HollowWeight, (tuple(self.ds_shape), self.dtype, self.device, self.module_name)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HollowWeight(shape={tuple(self.ds_shape)}, dtype={self.dtype}, held by the server)"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not _harmless(func, args):
            raise UnsupportedMethodError(_refusal(func, args))
        if (trained := _asks_for_gradient(func, args, kwargs or {})) is not None:
            if trained:
                raise UnsupportedMethodError(_training_refusal(args))
            args[0].frozen = True
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        # `.data`, `.to()` and the like must stay hollow: peft reads `weight.data`, not `weight`.
        source = next((a for a in args if isinstance(a, HollowWeight)), None)
        if source is not None and type(result) is torch.Tensor and result.numel() == 0:
            result = HollowWeight(source.ds_shape, result.dtype, result.device, source.module_name)
        return result


def keep_out_of_checkpoints(module: nn.Module) -> None:
    """A state dict of this module holds what the client holds: never a hollow weight."""
    module.register_state_dict_post_hook(_drop_hollow)
    module.register_load_state_dict_pre_hook(_refuse_base)


def _drop_hollow(module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object) -> None:
    for key, parameter in module._parameters.items():
        if isinstance(parameter, HollowWeight):
            state_dict.pop(prefix + key, None)


def _refuse_base(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    metadata: object,
    strict: bool,
    missing: list[str],
    *_: Any,
) -> None:
    for key, parameter in module._parameters.items():
        if not isinstance(parameter, HollowWeight):
            continue
        if prefix + key in state_dict:
            raise UnsupportedMethodError(
                f"cannot load {prefix + key}: the base weight of {parameter.module_name} stays on the server. Load "
                "the checkpoint there, or load only adapter and client parameters here"
            )
        state_dict[prefix + key] = parameter  # so that it is not missing; copying it onto itself does nothing


def _harmless(func: Any, args: tuple[Any, ...]) -> bool:
    name = getattr(func, "__name__", "")
    if name == "copy_":  # hollow to hollow, as when a state dict is loaded
        return len(args) > 1 and isinstance(args[0], HollowWeight) and isinstance(args[1], HollowWeight)
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(func, "__self__", None), "__name__", "") not in VALUE_PROPERTIES
    return name in HARMLESS


def _asks_for_gradient(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
    """The value that requires_grad is set to, if this sets it."""
    name = getattr(func, "__name__", "")
    if name == "requires_grad_":
        return bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    return bool(args[1]) if name == "__set__" and attribute == "requires_grad" else None


def _training_refusal(args: tuple[Any, ...]) -> str:
    name = _module_name(args) or "this layer"
    return (
        f"the base weight of {name} stays on the server and cannot be trained. Instead, train an adapter, or wrap a "
        f"model that has its weights with wrap(local=[...]), which keeps the layers that it names here"
    )


def _refusal(func: Any, args: tuple[Any, ...]) -> str:
    name = _module_name(args)
    module = f" of {name}" if name else ""
    what, instead = _who_asked()
    return (
        f"{what} needs the values of the base weight{module} (called {getattr(func, '__name__', func)}), which "
        f"stays on the server. Instead, {instead}"
    )


def _module_name(args: Any) -> str:
    return next((leaf.module_name for leaf in pytree.tree_leaves(args) if isinstance(leaf, HollowWeight)), "")


def _who_asked() -> tuple[str, str]:
    """The peft method on the call stack, for the message only."""
    for frame in inspect.stack(context=0)[3:]:
        if "peft" in frame.filename:
            for word, advice in ADVICE.items():
                if word in frame.function.lower() or word in frame.filename.rpartition("/")[2]:
                    return advice
    return "this operation", "choose a method that works on activations, such as LoRA or IA3 (docs/compatibility.md)"
