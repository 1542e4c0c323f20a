"""One client of the demo: fine-tunes an adapter on the server's model, as any notebook would.

    python -m symbiosis.integrations.demo_client --url grpc://HOST:PORT --method lora --out adapters/lora

`fine_tune` is the part to read: three calls of ours, then PEFT and a plain torch loop.
One rule: nothing here that a user could not write; progress leaves as events, so two clients share a terminal.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from peft import IA3Config, LoraConfig, PeftConfig, get_peft_model
from transformers import get_linear_schedule_with_warmup

import symbiosis
from symbiosis.connection import Connection
from symbiosis.errors import SymbiosisError
from symbiosis.integrations import demo_data, memory
from symbiosis.integrations.demo_events import Event, Failure, Measured, Progress, Result, encode

T = TypeVar("T")
Batch = dict[str, torch.Tensor]

BATCH_SIZE = 4
WARMUP_STEPS = 3
EVAL_BATCH_SIZE = 8  # with 49,152 words, the logits of a larger one would be the client's peak memory
MAX_TOKENS = 64  # of a pair; one pair in eight is longer
HELD_OUT_SHARE = 0.15  # of the questions
SEED = 0


@dataclass(frozen=True)
class Method:
    """A PEFT method and the learning rate that suits it."""

    config: Callable[[], PeftConfig]
    learning_rate: float


# Found with the local model: both lower the held-out loss by about 30% within 30 steps of 4 pairs.
# IA3 learns factors that start at one; they need a far higher rate than LoRA's matrices.
METHODS = {
    "lora": Method(
        lambda: LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]), 4e-3
    ),
    "ia3": Method(
        lambda: IA3Config(target_modules=["k_proj", "v_proj"], feedforward_modules=[], task_type="CAUSAL_LM"), 2e-2
    ),
}


@dataclass(frozen=True)
class Task:
    """What a client is told to do."""

    url: str
    method: str
    out: Path
    steps: int
    held_out_pairs: int
    questions: Sequence[str]
    answer_tokens: int


def main(argv: Sequence[str] | None = None) -> int:
    """Fine-tune, and write events to standard output; 0 if the adapter was saved."""
    task = _parse(argv)
    events = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        try:
            fine_tune(task, lambda event: print(encode(event), file=events, flush=True))
        except SymbiosisError as error:
            print(encode(Failure(error.code, str(error))), file=events, flush=True)
            return 1
    return 0


def fine_tune(task: Task, report: Callable[[Event], None]) -> None:
    """The whole life of a client; the last thing it reports is a Result."""
    imports_bytes = memory.resident_bytes()
    torch.manual_seed(SEED)
    with symbiosis.connect(task.url) as conn:
        model = conn.load_model()
        tokenizer = conn.tokenizer()
        model = get_peft_model(model, METHODS[task.method].config())
        loaded_bytes = memory.resident_bytes() - imports_bytes

        run = _Run(task, conn, model, tokenizer, report)
        before = run.measure("before")
        training = run.train()
        after = run.measure("after")
        model.save_pretrained(str(task.out))
        report(run.result(before, after, training, loaded_bytes, memory.peak_bytes() - imports_bytes))


def train_steps(model: Any, batches: Iterable[Batch], learning_rate: float, steps: int) -> Iterator[float]:
    """A plain training loop; yields the loss of each step."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, WARMUP_STEPS, steps)
    model.train()
    for _, batch in zip(range(steps), batches, strict=False):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield float(loss)


@torch.no_grad()
def answer_loss(model: Any, batches: Iterable[Batch]) -> float:
    """Mean loss per answer token over all batches."""
    model.eval()
    total, tokens = 0.0, 0
    for batch in batches:
        count = int((batch["labels"][:, 1:] != demo_data.IGNORED_LABEL).sum())  # the first has no prediction
        total += float(model(**batch).loss) * count
        tokens += count
    return total / tokens


def answer(model: Any, tokenizer: Any, question: str, max_tokens: int) -> str:
    """The greedy answer to a question, in the chat template."""
    model.eval()
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=max_tokens, do_sample=False)  # [1, T + new]
    text: str = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    return text


class _Run:
    """The demo's bookkeeping around the functions above: data, progress and numbers."""

    def __init__(self, task: Task, conn: Connection, model: Any, tokenizer: Any, report: Callable[[Event], None]):
        self.task, self.conn, self.model, self.tokenizer = task, conn, model, tokenizer
        training, held_out = demo_data.split_pairs(demo_data.load_pairs(), HELD_OUT_SHARE, SEED)
        self.training = demo_data.encode_all(training, tokenizer, MAX_TOKENS)
        self.held_out = demo_data.sample(demo_data.encode_all(held_out, tokenizer, MAX_TOKENS), task.held_out_pairs)
        self.batches = demo_data.held_out_batches(self.held_out, EVAL_BATCH_SIZE, tokenizer.pad_token_id)
        self._report, self._done = report, 0
        self._total = task.steps + 2 * (len(self.batches) + len(task.questions))

    def measure(self, when: str) -> Measured:
        loss = answer_loss(self.model, self._followed(f"loss {when}", self.batches))
        questions = self._followed(f"answers {when}", self.task.questions)
        answers = [answer(self.model, self.tokenizer, text, self.task.answer_tokens) for text in questions]
        return Measured(loss, answers)

    def train(self) -> dict[str, Any]:
        started_s, stats = time.time(), self.conn.stats()
        batches = demo_data.training_batches(self.training, BATCH_SIZE, self.tokenizer.pad_token_id, SEED)
        rate = METHODS[self.task.method].learning_rate
        self._tell("training")
        for loss in train_steps(self.model, batches, rate, self.task.steps):
            self._done += 1
            self._tell("training", loss)
        return {"started_s": started_s, "ended_s": time.time(), "stats": self.conn.stats() - stats}

    def result(
        self, before: Measured, after: Measured, training: dict[str, Any], loaded_bytes: int, peak_bytes: int
    ) -> Result:
        return Result(
            method=self.task.method,
            adapter_dir=str(self.task.out),
            training_pairs=len(self.training),
            held_out_pairs=len(self.held_out),
            before=before,
            after=after,
            steps=self.task.steps,
            loaded_bytes=loaded_bytes,
            peak_bytes=peak_bytes,
            base_bytes=self.conn.manifest.base_bytes,
            **training,
        )

    def _followed(self, phase: str, items: Sequence[T]) -> Iterator[T]:
        for item in items:
            self._tell(phase)
            yield item
            self._done += 1

    def _tell(self, phase: str, loss: float | None = None) -> None:
        self._report(Progress(phase, self._done, self._total, loss))


def _parse(argv: Sequence[str] | None) -> Task:
    parser = argparse.ArgumentParser(prog="python -m symbiosis.integrations.demo_client", description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--method", choices=sorted(METHODS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--held-out-pairs", type=int, required=True)
    parser.add_argument("--question", dest="questions", action="append", required=True)
    parser.add_argument("--answer-tokens", type=int, required=True)
    return Task(**vars(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
