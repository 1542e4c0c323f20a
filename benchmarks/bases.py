"""The base models: random-weight Llamas built from a config, and the demo model.

One rule: a base is a folder on disk, built once, so that server and local processes load the very same weights.
Weights are stored as bfloat16 and loaded as the dtype under test, so one folder serves both.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VOCABULARY = 32_000
# TinyLlama's shape is "1b"; "220m" is the one that fits 16 times in the memory of a small machine.
SHAPES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4},
    "220m": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16},
    "1b": {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32},
}
NAMES = ("demo", *SHAPES)


@dataclass(frozen=True)
class Base:
    """A base model: what the server is told, and the folder that a local process loads."""

    name: str
    dtype: str
    server_model: str
    folder: Path


def prepare(name: str, dtype: str, cache_dir: Path) -> Base:
    """Build or find a base, in a process of its own: the driver loads no torch.

    Raises:
        subprocess.CalledProcessError: it cannot be built; the process has said why.
    """
    command = [sys.executable, "-m", "benchmarks.bases", name, str(cache_dir)]
    folder = Path(subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    return Base(name, dtype, "demo" if name == "demo" else str(folder), folder)


def build(name: str, cache_dir: Path) -> Path:
    """The folder of a base; built if it is not there."""
    if name == "demo":
        from symbiosis.flight.demo_model import demo_model_path

        return Path(demo_model_path(None))
    folder = cache_dir / f"llama-{name}"
    if not (folder / "config.json").exists():
        _build_llama(SHAPES[name], folder)
    return folder


def _build_llama(shape: dict[str, int], folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    fields: dict[str, Any] = {
        **shape,
        "vocab_size": VOCABULARY,
        "num_key_value_heads": 4,
        "head_dim": shape["hidden_size"] // shape["num_attention_heads"],
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(0)
    # Untrained logits are nearly equal everywhere, and greedy text would hang on rounding: a larger head
    # spreads them as a trained one does.
    model: Any = LlamaForCausalLM(LlamaConfig(**fields)).bfloat16()
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    part = folder.with_suffix(".part")
    model.save_pretrained(part)
    part.rename(folder)


if __name__ == "__main__":
    print(build(sys.argv[1], Path(sys.argv[2])))
