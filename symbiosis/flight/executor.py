"""The one thread that touches the device: concatenate, compute, split.

One rule: a task fails alone. What a batch cannot compute together is computed task by task, and an
error goes to the future of the task that caused it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch

from symbiosis.errors import (
    DeadlineExceededError,
    RemoteComputeError,
    RemoteOutOfMemoryError,
    SymbiosisError,
)
from symbiosis.flight import segment
from symbiosis.flight.base_model import BaseModel
from symbiosis.flight.protocol import Step
from symbiosis.flight.scheduler import Batch, Key, Scheduler, Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Result:
    """Outputs of one task, each [N, d], on the CPU in the dtype of its input, and how they came about."""

    outputs: list[torch.Tensor]
    queue_s: float
    compute_s: float
    batch_requests: int
    batch_tokens: int


class Executor:
    """Runs batches of a scheduler on a base model, in a thread of its own.

    Args:
        base: the model.
        scheduler: where batches come from.
        threads: CPU threads per product; 0 leaves PyTorch's choice.
        observe: called after each batch with (batch, seconds computed); must be quick.
    """

    def __init__(
        self,
        base: BaseModel,
        scheduler: Scheduler,
        threads: int = 0,
        observe: Callable[[Batch, float], None] | None = None,
    ) -> None:
        self._base = base
        self._scheduler = scheduler
        self._threads = threads
        self._observe = observe or (lambda batch, seconds: None)
        self._thread = threading.Thread(target=self._loop, name="symbiosis-executor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread, which ends once the scheduler is closed and empty; True if it did."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _loop(self) -> None:
        if self._threads:
            # OpenMP and MKL count per thread: what was set in the main thread does not hold here.
            torch.set_num_threads(self._threads)
        with torch.no_grad():  # not inference_mode: a block's grad_input needs autograd inside
            while (batch := self._scheduler.next_batch()) is not None:
                try:
                    self._run(batch)
                except Exception as error:  # whatever it was: one batch fails, the server goes on
                    self._give_up(batch, error)

    @staticmethod
    def _give_up(batch: Batch, error: Exception) -> None:
        failure = _as_ours(error)
        for task in batch.tasks:
            if not task.result.done():
                task.result.set_exception(failure)

    def _run(self, batch: Batch) -> None:
        now_s = time.perf_counter()
        tasks = [task for task in batch.tasks if self._in_time(task, now_s)]
        if tasks and not self._attempt(tasks) and len(tasks) > 1:
            for task in tasks:
                self._attempt([task])

    def _attempt(self, tasks: list[Task]) -> bool:
        """Compute tasks as one; on failure a lone task gets its error, several are left unanswered."""
        started_s = time.perf_counter()
        try:
            outputs = self._compute(tasks)
        except Exception as error:
            if len(tasks) > 1:
                logger.warning("batch of %d failed together, trying each alone: %s", len(tasks), error)
            else:
                tasks[0].result.set_exception(_as_ours(error))
            return False
        computed_s = time.perf_counter() - started_s
        tokens = sum(task.tokens for task in tasks)
        for task, parts in zip(tasks, outputs, strict=True):
            task.result.set_result(Result(parts, started_s - task.enqueued_s, computed_s, len(tasks), tokens))
        batch = Batch(tasks[0].key, tuple(tasks))
        self._scheduler.done(batch, computed_s)
        self._observe(batch, computed_s)
        return True

    def _compute(self, tasks: list[Task]) -> list[list[torch.Tensor]]:
        """Concatenate by tokens -> one operation -> split: N_1 + N_2 + ... rows."""
        columns = zip(*(task.tensors for task in tasks), strict=True)
        inputs = [self._load(torch.cat(c) if len(c) > 1 else c[0]) for c in columns]
        outputs = self._operate(tasks[0].key, inputs)
        tokens, dtype = [task.tokens for task in tasks], tasks[0].tensors[0].dtype
        rows = [output.to(device="cpu", dtype=dtype).split(tokens) for output in outputs]
        return [list(parts) for parts in zip(*rows, strict=True)]

    def _operate(self, key: Key, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if key.op == "segment":
            return segment.run(self._base, cast("tuple[Step, ...]", key.steps), key.outputs, inputs)
        return [self._base.run(key.op, key.modules, inputs)]

    def _load(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = torch.float64 if tensor.dtype == torch.float64 else self._base.dtype
        return tensor.to(device=self._base.device, dtype=dtype)

    @staticmethod
    def _in_time(task: Task, now_s: float) -> bool:
        if not task.result.set_running_or_notify_cancel():  # its handler gave up; a cancelled future takes no error
            return False
        if now_s <= task.deadline_s:
            return True
        task.result.set_exception(
            DeadlineExceededError(f"call waited {now_s - task.enqueued_s:.3f} s in the queue, past its deadline")
        )
        return False


def _as_ours(error: Exception) -> SymbiosisError:
    """Any failure as one of the tree; details stay in the server's log."""
    if isinstance(error, SymbiosisError):
        return error
    logger.error("computing a call failed", exc_info=error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return RemoteOutOfMemoryError("the server's device ran out of memory for this call; send fewer tokens at once")
    return RemoteComputeError(f"the server failed while computing ({type(error).__name__}); its log has the details")
