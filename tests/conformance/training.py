"""What a line of the table on training is, and how it is proved: a loop that runs here and with a server.

One rule: a loop takes a model and knows nothing of us. It runs twice with the same seeds, on the local model and on the
wrapped one; what it returns and what it trained is compared, both in float32 unless the line says otherwise.

Tolerance: some ten steps of an optimizer that divides by the size of each gradient take two runs apart a little more
each step; 1e-3 of each loss, and ten times that
of each trained parameter. Measured: parameters 3e-7 in float32, 4e-2 in bfloat16, 2e-2 in float16.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from torch import nn

import symbiosis
from symbiosis.connection import Connection
from symbiosis.telemetry import CallEvent
from tests.client.conftest import difference, remote_layers
from tests.conformance.architectures import DECODER, UNTIED, tiny
from tests.conformance.harness import Bench, Build, Line, perturb

LOOP_TOLERANCE = 1e-3
STEPS = 6
BITS8, BITS11 = "bfloat16 has 8 bits: 1e-2", "float16 has 11 bits: 5e-3"

Wrap = Callable[[nn.Module], Any]
Loop = Callable[[Any, Path], Sequence[float]]
Make = Callable[[nn.Module, Wrap], Any]

llama = tiny("LlamaForCausalLM", **DECODER, **UNTIED)
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def adapted(model: nn.Module, **options: Any) -> Any:
    """The same LoRA each time, every matrix of it off its initial value."""
    made = peft.get_peft_model(model, peft.LoraConfig(**{**LORA, **options}))
    perturb(made)
    return made


def wrap_first(model: nn.Module, wrap: Wrap) -> Any:
    return adapted(wrap(model))


def without_adapter(model: nn.Module, wrap: Wrap) -> Any:
    """For loops that add it themselves."""
    return wrap(model)


@dataclass(frozen=True)
class Training(Line):
    """A loop.

    Args:
        loop: trains the model that it is given, in a folder of its own; its losses and metrics, in order.
        make: the model it is given, from the base and from what wraps it (locally nothing).
        build: the base.
        served: options of the server.
        reference: the base of the local run, from that of the server.
        needs: a package that is no part of every installation; without it the line is skipped, by this name.
        tolerance: of each number, and a tenth of that of each trained parameter; the note says why where it is another.
        watch: gets the calls of the wrapped run, and raises AssertionError if they are not what they should be.
    """

    loop: Loop | None = None
    make: Make = wrap_first
    build: Build = llama
    served: Mapping[str, Any] = field(default_factory=dict)
    reference: Callable[[nn.Module], nn.Module] = field(default=lambda base: base)
    needs: str = ""
    tolerance: float = LOOP_TOLERANCE
    watch: Callable[[list[CallEvent]], None] = field(default=lambda calls: None)


def check(line: Training, bench: Bench, folder: Path) -> None:
    """Prove a line.

    Raises:
        AssertionError: the two runs differ, or prove nothing.
    """
    assert line.loop is not None
    if line.needs:
        pytest.importorskip(line.needs, reason=f"{line.name} needs {line.needs}")
    base, url = bench.serve(line.build, **line.served)
    calls: list[CallEvent] = []
    with symbiosis.connect(url) as connection:
        remote, there = _run(line, base, connection.wrap, folder / "remote", connection, calls)
        local, here = _run(line, line.reference(base), lambda model: model, folder / "local")
    assert calls, "nothing was asked of the server"
    layers = remote_layers(remote)
    assert layers
    assert all(layer.weight.numel() == 0 for layer in layers), "base weights are here"
    assert len(there) == len(here)
    for number, (got, expected) in enumerate(zip(there, here, strict=True)):
        far = abs(got - expected)
        assert far <= line.tolerance * max(abs(expected), 0.1), f"number {number} is {got!r}, not {expected!r}"
    _same_parameters(remote, local, line.tolerance)
    line.watch(calls)


def _run(
    line: Training, base: nn.Module, wrap: Wrap, folder: Path, connection: Connection | None = None, calls: Any = None
) -> tuple[Any, Sequence[float]]:
    assert line.loop is not None
    folder.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = line.make(copy.deepcopy(base), wrap)
        before = trained(model)
        if connection is not None:
            connection.bus.subscribe(calls.append)
        torch.manual_seed(12)
        numbers = line.loop(model, folder)
    after = trained(model)
    assert any(name not in before or not torch.equal(before[name], value) for name, value in after.items())
    assert all(value.any() for name, value in after.items() if "lora_B" in name), "an adapter was not trained"
    return model, numbers


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad and p.numel()}


def _same_parameters(remote: nn.Module, local: nn.Module, tolerance: float) -> None:
    there, here = trained(remote), trained(local)
    assert there.keys() == here.keys(), f"{sorted(there.keys() ^ here.keys())} trained on one side only"
    assert here, "nothing is trained in the end"
    for name, expected in here.items():
        far = difference(there[name], expected)
        assert far <= 10 * tolerance, f"{name} is {far:.1e} away after training"


# --- data -------------------------------------------------------------------------------------------------------


def token_rows(count: int = 8, length: int = 10) -> torch.Tensor:
    return torch.randint(3, 96, (count, length), generator=torch.Generator().manual_seed(0))


def dataset(count: int = 8) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row} for row in token_rows(count)]


def tokenizer() -> Any:
    """One word, one token: `w0` to `w89`."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(90))])}
    inner = Tokenizer(WordLevel(words, unk_token="<s>"))
    inner.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def words(start: int, count: int = 8) -> str:
    return " ".join(f"w{(3 * start + i) % 90}" for i in range(count))
