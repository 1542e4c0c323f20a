"""Servers that can be killed and be back in a moment: one process loads everything once and forks servers.

    python nursery.py    then on stdin:  PORT [option=value ...]    ->  on stdout:  PID PORT
                         end of stdin ends all servers

gRPC is first used in the children, so forking is safe; all children serve the same seeded model.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from typing import Any

import torch
import transformers

import symbiosis
from symbiosis.flight.server import Server

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def tiny_model() -> Any:
    """The model that the servers hold; its client side is `Connection.load_model()`."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()


def main() -> None:
    model = tiny_model()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children that end leave nothing behind
    children = []
    print("ready", flush=True)
    for line in sys.stdin:
        port, *options = line.split()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _serve(model, int(port), dict(option.split("=") for option in options), writer)
        os.close(writer)
        children.append(child)
        with os.fdopen(reader) as answer:
            print(child, answer.readline().strip() or "failed", flush=True)
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def _serve(model: Any, port: int, options: dict[str, str], writer: int) -> None:
    torch.set_num_threads(1)
    server: Server = symbiosis.serve(model, port=port, **options)
    os.write(writer, f"{server.port}\n".encode())
    os.close(writer)

    def drain(number: int, frame: object) -> None:
        os._exit(0 if server.close() else 1)

    signal.signal(signal.SIGTERM, drain)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
