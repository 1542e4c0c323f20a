"""The demo's cross-check: the adapters that remote training saved, on the local base, in a process of its own.

    python -m symbiosis.integrations.demo_local --model FOLDER --adapter adapters/lora --question "Do you eat" ...

One rule: transformers and PEFT only. Nothing of symbiosis runs here, so equal answers mean ordinary adapters.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(argv: Sequence[str] | None = None) -> int:
    """Write one JSON object to standard output: the adapter's folder -> its answers."""
    options = _parse(argv)
    tokenizer: Any = AutoTokenizer.from_pretrained(options.model, local_files_only=True)
    found = {}
    for folder in options.adapters:
        base = AutoModelForCausalLM.from_pretrained(options.model, local_files_only=True)
        model = PeftModel.from_pretrained(base, folder).eval()
        found[folder] = [_answer(model, tokenizer, text, options.answer_tokens) for text in options.questions]
    print(json.dumps(found))
    return 0


def _answer(model: Any, tokenizer: Any, question: str, max_tokens: int) -> str:
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=max_tokens, do_sample=False)  # [1, T + new]
    text: str = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m symbiosis.integrations.demo_local", description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapter", dest="adapters", action="append", required=True)
    parser.add_argument("--question", dest="questions", action="append", required=True)
    parser.add_argument("--answer-tokens", type=int, required=True)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
