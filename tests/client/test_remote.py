"""A remote layer is, to everybody who looks, the layer that it replaced."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from symbiosis.connection import Connection
from symbiosis.errors import ClosedError, InvalidInputError, UnsupportedMethodError
from symbiosis.hollow import HollowWeight
from symbiosis.remote import RemoteConv1D, RemoteLinear
from tests.client.conftest import FAMILIES, Served, adapt, assert_same_step, difference, greedy, run_step, train


@pytest.fixture
def pair(served: Served, connection: Connection) -> tuple[Any, Any]:
    """A local model and the same one wrapped."""
    return served.model(), connection.wrap(served.model())


def same_output(remote: Any, local: Any, ids: torch.Tensor, tolerance: float = 1e-5) -> None:
    with torch.no_grad():
        assert difference(remote(input_ids=ids).logits, local(input_ids=ids).logits) <= tolerance


# --- what it shows ------------------------------------------------------------------------------


@pytest.mark.parametrize("served", FAMILIES, indirect=True)
def test_names_types_and_attributes_stay(pair: tuple[Any, Any]) -> None:
    local, remote = pair

    assert [name for name, _ in remote.named_modules()] == [name for name, _ in local.named_modules()]
    assert [name for name, _ in remote.named_parameters()] == [name for name, _ in local.named_parameters()]
    for ours, theirs in zip(remote.modules(), local.modules(), strict=True):
        assert isinstance(ours, type(theirs))
        for key, value in vars(theirs).items():
            if isinstance(value, (bool, int, float, str)):
                assert getattr(ours, key) == value
    assert (remote.device, remote.dtype) == (local.device, local.dtype)
    assert type(remote) is type(local)


@pytest.mark.parametrize("served", ["llama", "gpt2"], indirect=True)
def test_trainable_parameters_are_counted_as_locally(
    served: Served, connection: Connection, capsys: pytest.CaptureFixture[str]
) -> None:
    config = served.config("lora")
    adapt(served.model(), config).print_trainable_parameters()
    expected = capsys.readouterr().out

    adapt(connection.wrap(served.model()), config).print_trainable_parameters()

    assert capsys.readouterr().out == expected


def test_hooks_put_on_before_still_fire_and_can_be_removed(served: Served, connection: Connection, tokens: Any) -> None:
    model = served.model()
    seen: list[tuple[int, ...]] = []
    layer = model.model.layers[0].mlp.down_proj
    handle = layer.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape)))
    layer.note = "mine"

    connection.wrap(model)(input_ids=tokens())
    handle.remove()
    model(input_ids=tokens())

    assert seen == [(2, 9, 32)]
    assert model.model.layers[0].mlp.down_proj.note == "mine"


# --- what it computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(32,), (0, 32), (2, 0, 32), (3, 32), (2, 3, 4, 32)])
def test_any_leading_shape(pair: tuple[Any, Any], shape: tuple[int, ...]) -> None:
    local, remote = (model.model.layers[0].mlp.up_proj for model in pair)
    x = torch.randn(shape)

    torch.testing.assert_close(remote(x), local(x))


def test_inputs_that_are_not_contiguous(pair: tuple[Any, Any]) -> None:
    local, remote = (model.model.layers[0].mlp.up_proj for model in pair)
    for x in (torch.randn(32, 5).t(), torch.randn(5, 64)[:, ::2], torch.randn(1, 1, 32).expand(2, 3, 32)):
        torch.testing.assert_close(remote(x), local(x))


@pytest.mark.parametrize("served", ["llama", "gpt2"], indirect=True)
def test_gradients_reach_inputs_embeds(served: Served, pair: tuple[Any, Any], tokens: Any) -> None:
    gradients = []
    for model in pair:
        embeds = model.get_input_embeddings()(tokens()).detach().requires_grad_()
        model(inputs_embeds=embeds, labels=tokens()).loss.backward()
        gradients.append(embeds.grad)

    assert difference(*gradients[::-1]) <= 1e-4


@pytest.mark.parametrize("served", ["llama", "gpt2"], indirect=True)
def test_in_place_work_on_outputs(served: Served, connection: Connection, tokens: Any) -> None:
    """As users' hooks and some models (MPT, Falcon) do."""

    def change(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output.mul_(1.5).add_(0.1)

    steps = []
    for wrap in (lambda model: model, connection.wrap):
        model = adapt(wrap(served.model()), served.config("lora"))
        for name, module in model.named_modules():
            if name.endswith(("k_proj", "up_proj", "mlp.c_fc", "o_proj")):
                module.register_forward_hook(change)
        steps.append(run_step(model, tokens()))
        with torch.no_grad():
            steps[-1].logits = model(input_ids=tokens()).logits

    assert_same_step(steps[1], steps[0])


@pytest.mark.parametrize("served", ["llama", "gpt2"], indirect=True)
def test_bfloat16_autocast(served: Served, connection: Connection, tokens: Any) -> None:
    local = adapt(served.model(), served.config("lora"))
    remote = adapt(connection.wrap(served.model()), served.config("lora"))
    with torch.autocast("cpu", torch.bfloat16):
        there, here = run_step(remote, tokens()), run_step(local, tokens())

    assert there.logits.dtype == here.logits.dtype
    # The server multiplies bfloat16 inputs by fp32 weights, local autocast rounds the weights first: 2^-9 each.
    assert abs(there.loss - here.loss) <= 5e-3 * here.loss
    for name, expected in here.gradients.items():
        assert difference(there.gradients[name], expected) <= 5e-2, name


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(pair: tuple[Any, Any], tokens: Any, mode: Any) -> None:
    local, remote = pair
    with mode():
        outputs = [remote(input_ids=tokens()).logits for _ in range(2)]
        expected = local(input_ids=tokens()).logits

    for logits in outputs:
        assert difference(logits, expected) <= 1e-5
        assert not logits.requires_grad


def test_a_mode_may_change_between_passes(served: Served, connection: Connection, tokens: Any) -> None:
    local = adapt(served.model(), served.config("lora"))
    remote = adapt(connection.wrap(served.model()), served.config("lora"))
    expected = run_step(local, tokens())

    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert difference(remote(input_ids=tokens()).logits, expected.logits) <= 1e-5
        assert_same_step(run_step(remote, tokens()), expected)


def test_train_and_eval(served: Served, connection: Connection, tokens: Any) -> None:
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.3, task_type="CAUSAL_LM")
    local, remote = adapt(served.model(), config), adapt(connection.wrap(served.model()), config)

    for train_mode in (True, False):
        steps = []
        for model in (remote, local):
            model.train(train_mode)
            torch.manual_seed(5)  # dropout is drawn here, in the same order
            steps.append(run_step(model, tokens()))
        assert_same_step(*steps)
    assert all(not module.training for module in remote.modules())


# --- moving and copying ---------------------------------------------------------------------------


@pytest.mark.parametrize("served", ["llama", "gpt2"], indirect=True)
def test_to_another_dtype_and_back(pair: tuple[Any, Any], tokens: Any) -> None:
    local, remote = pair

    remote.to(torch.bfloat16).to("cpu")
    local.to(torch.bfloat16)
    assert remote.dtype == torch.bfloat16
    with torch.no_grad():
        logits = remote(input_ids=tokens()).logits
    assert logits.dtype == torch.bfloat16
    same_output(remote, local, tokens(), tolerance=5e-2)
    assert all(
        isinstance(m.weight, HollowWeight) for m in remote.modules() if isinstance(m, (RemoteLinear, RemoteConv1D))
    )

    remote.float()
    local.float()
    same_output(remote, local, tokens(), tolerance=5e-2)


@pytest.mark.parametrize("granularity", ["module", "auto"])
def test_a_deep_copy_works_by_itself(served: Served, connection: Connection, tokens: Any, granularity: Any) -> None:
    original = adapt(connection.wrap(served.model(), granularity=granularity), served.config("lora"))
    before = run_step(original, tokens())
    copied = copy.deepcopy(original)

    train(copied, tokens(), steps=3, lr=0.1)

    assert_same_step(run_step(original, tokens()), before)
    local = adapt(served.model(), served.config("lora"))
    train(local, tokens(), steps=3, lr=0.1)
    assert_same_step(run_step(copied, tokens()), run_step(local, tokens()))
    assert torch.equal(greedy(copied, tokens(1, 4)), greedy(local, tokens(1, 4)))


def test_copies_may_take_turns(served: Served, connection: Connection, tokens: Any) -> None:
    """A reference model and a policy see the same hidden states at layer 0."""
    first = adapt(connection.wrap(served.model()), served.config("lora"))
    second = copy.deepcopy(first)
    expected = run_step(first, tokens())

    embeds = first.get_input_embeddings()(tokens())
    outputs = [model(inputs_embeds=embeds, labels=tokens()) for model in (first, second, first, second)]

    for output in outputs:
        assert difference(output.logits, expected.logits) <= 1e-5


def test_pickling_is_refused(pair: tuple[Any, Any], connection: Connection) -> None:
    for live in (pair[1], connection):
        with pytest.raises(TypeError, match="live connection"):
            pickle.dumps(live)


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(2, 31), r"up_proj got an input of shape \(2, 31\), expected \[\.\.\., 32\]"),
        (torch.zeros(()), r"shape \(\), expected \[\.\.\., 32\]"),
        (torch.zeros(2, 32, dtype=torch.int64), r"input of torch\.int64, expected torch\.float32"),
        (torch.zeros(2, 32, dtype=torch.float64), r"input of torch\.float64, expected torch\.float32"),
        (torch.zeros(2, 32, dtype=torch.bfloat16), r"input of torch\.bfloat16, expected torch\.float32"),
    ],
    ids=["width", "scalar", "int", "double", "bfloat16"],
)
def test_inputs_that_cannot_be_right(pair: tuple[Any, Any], tokens: Any, x: torch.Tensor, words: str) -> None:
    local, remote = pair
    with pytest.raises(InvalidInputError, match=words):
        remote.model.layers[0].mlp.up_proj(x)

    same_output(remote, local, tokens())


def test_integers_are_no_input_under_autocast_either(pair: tuple[Any, Any]) -> None:
    layer = pair[1].model.layers[0].mlp.up_proj
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(InvalidInputError, match=r"torch\.int64"):
        layer(torch.zeros(2, 32, dtype=torch.int64))


def test_a_closed_connection(pair: tuple[Any, Any], connection: Connection, tokens: Any) -> None:
    connection.close()
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(ClosedError, match="connect again"):
            pair[1](input_ids=tokens())


def test_base_weights_cannot_be_trained(pair: tuple[Any, Any], tokens: Any) -> None:
    local, remote = pair
    with pytest.raises(UnsupportedMethodError, match=r"up_proj.*cannot be trained.*adapter"):
        remote.model.layers[0].mlp.up_proj.requires_grad_()
    with pytest.raises(UnsupportedMethodError, match="cannot be trained"):
        remote.model.layers[0].mlp.up_proj.weight.requires_grad = True

    remote.requires_grad_(False)
    same_output(remote, local, tokens())


# --- state dicts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("served", ["qwen2", "gpt2"], indirect=True)
def test_a_state_dict_holds_what_the_client_holds(pair: tuple[Any, Any]) -> None:
    local, remote = pair
    state = remote.state_dict()

    assert all(value.numel() for value in state.values())
    assert state.keys() < local.state_dict().keys()
    assert {name.rpartition(".")[2] for name in local.state_dict().keys() - state.keys()} == {"weight"}


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("served", ["qwen2", "gpt2"], indirect=True)
def test_loading_its_own_state_dict(served: Served, connection: Connection, tokens: Any, assign: bool) -> None:
    remote = connection.wrap(served.model())
    state = {name: value.clone() for name, value in remote.state_dict().items()}
    with torch.no_grad():
        for parameter in remote.parameters():
            if parameter.numel():
                parameter.zero_()

    result = remote.load_state_dict(state, assign=assign)

    assert not result.missing_keys
    assert not result.unexpected_keys
    remote.tie_weights()
    same_output(remote, served.base, tokens())


def test_loading_base_weights_is_refused(pair: tuple[Any, Any], tokens: Any) -> None:
    local, remote = pair
    with pytest.raises(UnsupportedMethodError, match=r"cannot load .*q_proj\.weight.*stays on the server"):
        remote.load_state_dict(local.state_dict())

    same_output(remote, local, tokens())


@pytest.mark.parametrize("served", ["gpt2"], indirect=True)
def test_conv1d_stays_one(pair: tuple[Any, Any]) -> None:
    local, remote = (model.transformer.h[0].mlp.c_fc for model in pair)

    assert isinstance(remote, Conv1D)
    assert (remote.nx, remote.nf) == (32, 56)
    assert remote.weight.ds_shape == local.weight.shape
    assert repr(remote) == repr(local)
