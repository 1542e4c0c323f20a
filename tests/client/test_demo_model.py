"""The promises of the tiny models, kept by a real one: SmolLM2-135M, in fp32, its server in a process of its own."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

import symbiosis
from symbiosis.connection import Connection
from tests.client.conftest import (
    GRADIENT_TOLERANCE,
    adapt,
    assert_holds_no_base,
    assert_same_step,
    greedy,
    run_step,
    train,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

QV = ["q_proj", "v_proj"]
DOWN = ["down_proj"]
CONFIGS = {
    "lora": peft.LoraConfig(r=8, target_modules=QV, task_type="CAUSAL_LM"),
    "lora-all": peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    "ia3": peft.IA3Config(target_modules=[*QV, *DOWN], feedforward_modules=DOWN, task_type="CAUSAL_LM"),
}


@pytest.fixture(scope="module")
def folder() -> Path:
    pytest.importorskip("gguf")
    from symbiosis.flight.demo_model import demo_model_path

    return demo_model_path()


@pytest.fixture(scope="module")
def base(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "symbiosis.flight.cli", "--model", str(folder), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        try:
            assert line.startswith("listening on"), line
            yield line.split()[2]
        finally:
            server.terminate()
            server.wait(30)


@pytest.fixture
def connection(url: str) -> Iterator[Connection]:
    with symbiosis.connect(url) as conn:
        yield conn


@pytest.fixture(scope="module")
def ids(folder: Path) -> torch.Tensor:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = ["The server holds the frozen base once, and", "Every client trains an adapter of its own: it"]
    encoded: torch.Tensor = tokenizer(texts, return_tensors="pt", padding=True).input_ids
    return encoded


@pytest.mark.parametrize(
    ("method", "granularity"), [("lora", "auto"), ("lora-all", "linear"), ("ia3", "auto"), ("lora", "module")]
)
def test_one_step_and_greedy_text(
    base: Any, connection: Connection, ids: torch.Tensor, method: str, granularity: Any
) -> None:
    local = adapt(copy.deepcopy(base), CONFIGS[method], scale=0.01)
    remote = adapt(connection.wrap(copy.deepcopy(base), granularity=granularity), CONFIGS[method], scale=0.01)

    for _ in range(2):
        assert_same_step(run_step(remote, ids), run_step(local, ids), GRADIENT_TOLERANCE)
    assert connection.stats().calls > 0
    assert torch.equal(greedy(remote, ids[:1], 12), greedy(local, ids[:1], 12))
    assert_holds_no_base(remote, base, local)


@pytest.mark.parametrize("method", ["lora", "ia3"])
def test_twenty_steps(base: Any, connection: Connection, ids: torch.Tensor, method: str) -> None:
    local = adapt(copy.deepcopy(base), CONFIGS[method], scale=0.01)
    remote = adapt(connection.load_model(), CONFIGS[method], scale=0.01)

    there, here = train(remote, ids, lr=1e-3), train(local, ids, lr=1e-3)

    assert here[0] - here[-1] > 0.02
    assert max(abs(a - b) for a, b in zip(there, here, strict=True)) <= 1e-3


def test_greedy_and_beam_from_the_skeleton(base: Any, connection: Connection, ids: torch.Tensor) -> None:
    model = connection.load_model()

    for options in ({}, {"num_beams": 3}):
        assert torch.equal(greedy(model, ids[:1], 12, **options), greedy(base, ids[:1], 12, **options))


MEASURE = """
import json, sys
import torch, transformers, peft, symbiosis
from symbiosis.connection import connect
from symbiosis.integrations.memory import peak_bytes
torch.set_num_threads(2)
before = peak_bytes()
with connect(sys.argv[1]) as conn:
    model = conn.load_model()
    loaded = peak_bytes()
    with torch.no_grad():
        logits = model(input_ids=torch.arange(32)[None]).logits
    print(json.dumps({"load": loaded - before, "all": peak_bytes() - before, "last": logits[0, -1, :4].tolist()}))
"""


def test_a_client_takes_little_memory(base: Any, url: str) -> None:
    """Less than 40% of the base's fp32 size above bare imports; the embedding alone, which it holds, is 21%."""
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, url],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TQDM_DISABLE": "1"},
    )
    found = json.loads(result.stdout.splitlines()[-1])

    base_bytes = sum(parameter.numel() * 4 for parameter in base.parameters())
    with torch.no_grad():
        expected = base(input_ids=torch.arange(32)[None]).logits[0, -1, :4]
    torch.testing.assert_close(torch.tensor(found["last"]), expected, rtol=1e-4, atol=1e-4)
    assert found["all"] < 0.4 * base_bytes, f"{found['all'] / 1e6:.0f} MB of a base of {base_bytes / 1e6:.0f} MB"


CLIENT = """
import json, sys
import torch, transformers, peft, symbiosis
from symbiosis.connection import connect
from tests.client.conftest import adapt, train
from tests.client.test_demo_model import CONFIGS
torch.set_num_threads(1)
ids = torch.tensor(json.loads(sys.argv[3]))
with connect(sys.argv[1]) as conn:
    model = adapt(conn.load_model(), CONFIGS[sys.argv[2]], scale=0.01)
    print("ready", flush=True)
    sys.stdin.readline()  # until the other is ready too
    marks = []
    conn.bus.subscribe(lambda event: marks.append(event.batch_requests))
    losses = train(model, ids, steps=14, lr=1e-3)
    late = marks[len(marks) // 3 :]  # the scheduler needs a few steps to foresee who comes when
    print(json.dumps({"losses": losses, "mean_batch": sum(late) / len(late)}))
"""


def test_two_processes_share_the_base(base: Any, url: str, ids: torch.Tensor) -> None:
    """LoRA and IA3 at once: each with the losses that it has alone, and more than 1.3 requests in the mean batch."""
    methods, ids = ("lora", "ia3"), ids.repeat(2, 3)
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", CLIENT, url, method, json.dumps(ids.tolist())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "TQDM_DISABLE": "1"},
        )
        for method in methods
    ]
    try:
        for client in clients:
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n"
        for client in clients:
            assert client.stdin is not None
            client.stdin.write("\n")
            client.stdin.flush()
        results = [json.loads(client.communicate(timeout=600)[0]) for client in clients]
    finally:
        for client in clients:
            client.kill()
            client.wait(30)

    for method, result in zip(methods, results, strict=True):
        local = adapt(copy.deepcopy(base), CONFIGS[method], scale=0.01)
        assert result["losses"] == pytest.approx(train(local, ids, steps=14, lr=1e-3), abs=1e-3)
    assert min(result["mean_batch"] for result in results) > 1.3
