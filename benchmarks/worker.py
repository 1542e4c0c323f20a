"""A client process: reads one command per line from stdin, answers one JSON line per command on stdout.

    python -m benchmarks.worker local|wrapped

One rule: it imports what its kind of user imports, says so, and then waits; so memory can be measured above
bare imports. It ends when its stdin does, and so never outlives the driver.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from typing import Any

Answer = dict[str, Any]


class Worker:
    """The state of a client process: a model, an adapter on it, and the work it can do."""

    def __init__(self, kind: str) -> None:
        import peft  # noqa: F401  a bare import is part of what is measured
        import torch
        import transformers

        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        self._torch = torch
        self._kind = kind
        self._connection: Any = None
        self._model: Any = None
        self._work: dict[str, Any] = {}
        self._events: list[Any] = []
        self._first_values: dict[str, Any] = {}
        if kind == "wrapped":
            importlib.import_module("symbiosis.connection")

    # --- commands ---------------------------------------------------------------------------------

    def connect(self, url: str) -> Answer:
        """Connect without loading a model: enough to ask for statistics."""
        import symbiosis

        self._connection = symbiosis.connect(url)
        return {"transport": self._transport()}

    def load(self, source: str, dtype: str, method: str, seed: int, granularity: str = "auto") -> Answer:
        """Load the base (a folder, or through the server at a URL) with an adapter on it."""
        from benchmarks import adapters

        torch_dtype = getattr(self._torch, dtype)
        if self._kind == "wrapped":
            self.connect(source)
            self._connection.bus.subscribe(self._events.append)
            base = self._connection.load_model(dtype=torch_dtype, granularity=granularity)
        else:
            import transformers

            base = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch_dtype)
        self._model = adapters.attach(base, method, seed)
        trained = ((name, p) for name, p in self._model.named_parameters() if p.requires_grad)
        self._first_values = {name: p.detach().clone() for name, p in trained}
        return {}

    def prepare(self, sequences: int, length: int, prompt: int, new: int, seed: int) -> Answer:
        """Set up data for training steps, prefill and decode; training starts over."""
        from benchmarks import work

        vocabulary = self._model.get_base_model().config.vocab_size if self._peft() else self._model.config.vocab_size
        trainer = work.Trainer(self._model, sequences, length, vocabulary, seed)
        generator = work.Generator(self._model, prompt, new, vocabulary, seed)
        self._work = {"train": trainer.step, "prefill": generator.prefill, "decode": generator.decode}
        self._work |= {"tokens": generator.tokens, "text": generator.text, "gradients": trainer.gradients}
        return {}

    def restart(self) -> Answer:
        """Give the adapter its first values again."""
        for name, parameter in self._model.named_parameters():
            if name in self._first_values:
                parameter.data.copy_(self._first_values[name])
        return {}

    def threads(self, count: int) -> Answer:
        """Threads for torch's operators."""
        self._torch.set_num_threads(count)
        return {}

    def check(self) -> Answer:
        """What both sides must agree on: loss, gradient norms, greedy text."""
        loss, norms = self._work["gradients"]()
        return {"loss": loss, "norms": norms, "text": self._work["text"]()}

    def repeat(self, work: str, count: int) -> Answer:
        """Do a piece of work a number of times."""
        from benchmarks.work import repeat

        return {"units": [dataclasses.astuple(unit) for unit in repeat(self._work[work], count)]}

    def until(self, work: str, start_at_s: float, stop_at_s: float) -> Answer:
        """Do a piece of work from one moment to another."""
        from benchmarks.work import until

        return {"units": [dataclasses.astuple(unit) for unit in until(self._work[work], start_at_s, stop_at_s)]}

    def traffic(self, work: str, count: int) -> Answer:
        """Calls and bytes of a piece of work, by operation; the output head is counted apart."""
        self._events.clear()
        self.repeat(work, count)
        found: Counter[str] = Counter()
        for event in self._events:
            head = "head." if any(name.endswith("lm_head") for name in event.modules) else ""
            found[f"{head}{event.op}.calls"] += 1
            found[f"{head}{event.op}.bytes_out"] += event.bytes_out
            found[f"{head}{event.op}.bytes_in"] += event.bytes_in
        config = self._connection.manifest.config
        return {"counts": dict(found), "layers": json.loads(config)["num_hidden_layers"]}

    def calls(self, nbytes: int, seconds: float) -> Answer:
        """Forward calls of one square linear with a body of about that many bytes each way."""
        caller, module = self._connection._caller, self._square_module()
        dtype = next(self._model.parameters()).dtype
        tokens = max(1, nbytes // (module.d_in * dtype.itemsize))
        x = self._torch.randn(tokens, module.d_in).to(dtype)
        for _ in range(3):
            caller.call("forward", [module.name], [x])
        self._events.clear()
        stop_at_s = time.monotonic() + seconds
        while time.monotonic() < stop_at_s or len(self._events) < 5:
            caller.call("forward", [module.name], [x])
        names = ("elapsed_s", "serialise_s", "network_s", "queue_s", "compute_s", "bytes_out", "bytes_in")
        return {"tokens": tokens} | {name: [getattr(e, name) for e in self._events] for name in names}

    def stats(self) -> Answer:
        """Where the time went since connect."""
        return dataclasses.asdict(self._connection.stats())

    def busy(self, start_at_s: float, stop_at_s: float) -> Answer:
        """The server's counters between two moments."""
        time.sleep(max(0.0, start_at_s - time.monotonic()))
        before = self._connection.server_stats()
        time.sleep(max(0.0, stop_at_s - time.monotonic()))
        after = self._connection.server_stats()
        requests, batches = after.requests - before.requests, after.batches - before.batches
        wall_s = after.uptime_s - before.uptime_s
        return {
            "share": (after.compute_s - before.compute_s) / wall_s,
            "mean_batch": requests / max(1, batches),
            "errors": after.errors - before.errors,
        }

    def plan(self) -> Answer:
        """What runs where, as the connection shows it."""
        return {"plan": str(self._connection.plan), "transport": self._transport()}

    # --- helpers ----------------------------------------------------------------------------------

    def _peft(self) -> bool:
        return hasattr(self._model, "get_base_model")

    def _transport(self) -> str:
        channel = self._connection._channel
        return str(getattr(channel, "transport", type(channel).__name__))

    def _square_module(self) -> Any:
        modules = self._connection.manifest.modules
        return next(info for info in modules if info.kind == "linear" and info.d_in == info.d_out)


def main() -> int:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints goes to the log
    try:
        worker = Worker(sys.argv[1])
        print(json.dumps({"ready": os.getpid()}), file=answers)
        for line in sys.stdin:
            command = json.loads(line)
            print(json.dumps(_answer(worker, command.pop("do"), command)), file=answers)
    except (KeyboardInterrupt, BrokenPipeError):
        return 1
    return 0


def _answer(worker: Worker, name: str, arguments: Answer) -> Answer:
    try:
        run: Callable[..., Answer] = getattr(worker, name)
        return run(**arguments)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main())
