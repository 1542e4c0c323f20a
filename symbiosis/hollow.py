"""HollowWeight: stands where a base weight stood, shows what it was, and holds nothing.

One rule: whatever only looks (dtype, device, shape, `.to()`) works; products, sums and norms become an
Expression, which calls compute; whatever would read values or train them raises UnsupportedMethodError, and
names the method that asked. Without the trap PiSSA or a merge would fail on a shape, or worse, go on with nothing.

Rejected: a full-shape expanded tensor (`.to()` would materialise it, and reading it would be silently
wrong) and a meta tensor (it breaks `.to()` and Trainer, and pulls new adapters onto meta).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from symbiosis.advice import METHODS, refusal, who_asked
from symbiosis.errors import UnsupportedMethodError
from symbiosis.expression import RULES, Expression, operation_of
from symbiosis.matrix import Weight

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
        "new_empty",
        "new_zeros",
        "new_tensor",
        "__bool__",
    ]
)
VALUE_PROPERTIES = frozenset(("T", "mT", "H", "mH", "real", "imag"))


class HollowWeight(nn.Parameter):
    """A frozen parameter without elements.

    Attributes:
        shape: the shape that it stands for; it has no elements.
        ds_shape, ds_numel: the same, and the size, under the names by which peft reads the true shape
            of DeepSpeed's partitioned parameters.
        module_name: the base module it belongs to.
        node: what calls can compute with it, if they can.
        frozen: whether somebody asked for it not to be trained, as peft does; it never is.
    """

    ds_shape: torch.Size
    module_name: str
    node: Weight | None
    frozen: bool

    def __new__(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        module_name: str = "",
        node: Weight | None = None,
    ) -> HollowWeight:
        empty = torch.empty((0,) * len(shape), dtype=dtype, device=device)
        weight: HollowWeight = torch.Tensor._make_subclass(cls, empty, False)
        weight.ds_shape = torch.Size(shape)
        weight.module_name = module_name
        weight.node = node
        weight.frozen = False
        return weight

    def as_expression(self) -> Expression:
        """The weight as something that can be computed with; of one that has a node."""
        assert self.node is not None
        return Expression(self.node, self.dtype, self.device)

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
        copied = HollowWeight(self.ds_shape, self.dtype, self.device, self.module_name, self.node)
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
        kwargs = kwargs or {}
        operation = operation_of(func)
        if operation in ABOUT_SHAPE:
            return ABOUT_SHAPE[operation](*args, **kwargs)
        if operation in LIKE:
            return _real(func, *args, **kwargs)
        if not _harmless(operation, args):
            return _computed(func, operation, args, kwargs)
        if (trained := _asks_for_gradient(operation, args, kwargs)) is not None:
            if trained:
                raise UnsupportedMethodError(_training_refusal(args))
            args[0].frozen = True
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        # `.data`, `.to()` and the like must stay hollow: peft reads `weight.data`, not `weight`.
        source = next((a for a in args if isinstance(a, HollowWeight)), None)
        if source is not None and type(result) is torch.Tensor and result.numel() == 0:
            result = HollowWeight(source.ds_shape, result.dtype, result.device, source.module_name, source.node)
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


def _harmless(operation: str, args: tuple[Any, ...]) -> bool:
    if operation in ("copy_", "set_", ".data="):  # hollow to hollow, as when a state dict is loaded
        return len(args) > 1 and all(isinstance(arg, HollowWeight) for arg in args[:2])
    if operation.startswith("."):
        return operation.removeprefix(".") not in VALUE_PROPERTIES
    return operation in HARMLESS


def _computed(func: Any, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same on expressions, for what they can do; in place only on a copy, for here it would be a merge."""
    found = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, HollowWeight)]
    in_place = operation.endswith("_") and (operation.startswith("__i") or not operation.startswith("__"))
    refused = in_place and args and isinstance(args[0], HollowWeight)
    if refused or operation not in RULES or any(weight.node is None for weight in found):
        raise UnsupportedMethodError(refusal(operation, found[0].module_name if found else ""))
    args, kwargs = pytree.tree_map_only(HollowWeight, HollowWeight.as_expression, (args, kwargs))
    return func(*args, **kwargs)


def _real(func: Any, like: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A tensor of the shape that is shown, which the caller fills."""
    shown = torch.empty(like.ds_shape, dtype=like.dtype, device="meta")
    made: torch.Tensor = func(shown, *args, **{"device": like.device, **kwargs})
    return made


def _size(weight: Any, dim: int | None = None) -> Any:
    return weight.ds_shape if dim is None else weight.ds_shape[dim]


LIKE = frozenset(("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"))
ABOUT_SHAPE = {".shape": _size, "size": _size, "__len__": lambda weight: weight.ds_shape[0]}


def _asks_for_gradient(operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
    """The value that requires_grad is set to, if this sets it."""
    if operation == "requires_grad_":
        return bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    return bool(args[1]) if operation == ".requires_grad=" else None


def _training_refusal(args: tuple[Any, ...]) -> str:
    name = _module_name(args) or "this layer"
    what, instead = who_asked()
    message = f"the base weight of {name} stays on the server and cannot be trained"
    if what in METHODS:
        return f"{message}, which {what} does for a while. Instead, {instead}"
    return (
        f"{message}. Instead, train an adapter, or wrap a model that has its weights with wrap(local=[...]), which "
        "keeps the layers that it names here"
    )


def _module_name(args: Any) -> str:
    return next((leaf.module_name for leaf in pytree.tree_leaves(args) if isinstance(leaf, HollowWeight)), "")
