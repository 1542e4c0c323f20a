"""Two servers of one base, and a tap on what travels between a client and the first of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from symbiosis.config import ClientOptions, Masking, ServerOptions
from symbiosis.connection import Connection
from symbiosis.flight.base_model import BaseModel
from symbiosis.flight.channel import FlightChannel
from symbiosis.flight.replicas import Replicas
from symbiosis.flight.server import Server
from symbiosis.privacy.traffic import Tap


class Pair:
    """A base, a server of it and a second one, the dealer."""

    def __init__(self, base: nn.Module, servers: list[Server]) -> None:
        self.base = base
        self.server, self.dealer = servers

    def model(self) -> Any:
        """A copy with weights of its own."""
        return copy.deepcopy(self.base)

    def masking(self, **options: Any) -> Masking:
        return Masking(**{"dealer": self.dealer.url, **options})


@pytest.fixture(scope="session")
def pair_of(tiny_llama: Any, tiny_qwen2: Any, tiny_gemma2: Any, tiny_gpt2: Any) -> Iterator[Callable[[str], Pair]]:
    """pair_of("llama"): the same servers for every test that asks; no test may close them."""
    families = {"llama": tiny_llama, "qwen2": tiny_qwen2, "gemma2": tiny_gemma2, "gpt2": tiny_gpt2}
    started: dict[str, Pair] = {}
    with ExitStack() as stack:

        def find(family: str) -> Pair:
            if family not in started:
                base = families[family](seed=20)
                servers = [
                    stack.enter_context(Server(BaseModel(base), ServerOptions(model=family, port=0))) for _ in range(2)
                ]
                started[family] = Pair(base, servers)
            return started[family]

        yield find


@pytest.fixture
def pair(pair_of: Callable[[str], Pair]) -> Pair:
    return pair_of("llama")


@pytest.fixture
def tapped() -> Iterator[Callable[..., tuple[Connection, Tap]]]:
    """tapped(url, privacy): a connection, and all that its server sees."""
    with ExitStack() as stack:

        def connect(url: str, privacy: Any = None) -> tuple[Connection, Tap]:
            tap = Tap(FlightChannel(url))
            return stack.enter_context(Connection(Replicas([tap], 0.0), ClientOptions(), privacy)), tap

        yield connect


@pytest.fixture(scope="session")
def demo_pair() -> Iterator[Pair]:
    """The demo model, and two servers of it in this process, over the same weights."""
    pytest.importorskip("gguf")
    from symbiosis.flight.demo_model import demo_model_path

    base = transformers.AutoModelForCausalLM.from_pretrained(demo_model_path(), dtype=torch.float32).eval()
    with ExitStack() as stack:
        options = ServerOptions(model="demo", port=0)
        yield Pair(base, [stack.enter_context(Server(BaseModel(base), options)) for _ in range(2)])


@pytest.fixture(scope="session")
def demo_tokenizer() -> Any:
    pytest.importorskip("gguf")
    from symbiosis.flight.demo_model import demo_model_path

    return transformers.AutoTokenizer.from_pretrained(demo_model_path())
