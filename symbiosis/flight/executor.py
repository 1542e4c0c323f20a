"""What touches the device, one thread at a time: concatenate, compute, split.

A client that is alone is computed for in the thread that read its request: handing it over, and the result back,
would take longer than many a product. Where several are about, a thread of its own batches their requests.

One rule: a task fails alone. What a batch cannot compute together is computed task by task, and an
error goes to the future of the task that caused it. What does not fit in the device's memory is computed in
halves, once.

While small requests are about, a large batch is computed in slices of its rows, and they go in between.
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
from symbiosis.flight.soft_cache import Kept, SoftCache

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
    """Runs batches of a scheduler on a base model.

    Args:
        base: the model.
        scheduler: where batches come from.
        threads: CPU threads per product; 0 leaves PyTorch's choice.
        observe: called after each batch with (batch, seconds computed); must be quick.
        soft_cache: keeps what forwards computed for the gradients that follow.
    """

    def __init__(
        self,
        base: BaseModel,
        scheduler: Scheduler,
        threads: int = 0,
        observe: Callable[[Batch, float], None] | None = None,
        soft_cache: SoftCache | None = None,
    ) -> None:
        self._base = base
        self._scheduler = scheduler
        self._threads = threads
        self._soft_cache = soft_cache or SoftCache(0)
        self._observe = observe or (lambda batch, seconds: None)
        self._busy_since_s: float | None = None
        self._device = threading.Lock()
        self._of_thread = threading.local()
        self._thread = threading.Thread(target=self._loop, name="symbiosis-executor", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until all that was accepted is computed, once the scheduler is closed; True if it is."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        left_s = -1.0 if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        finished = self._device.acquire(timeout=left_s)  # another thread may be computing for a client that is alone
        if finished:
            self._device.release()
        return finished

    def submit(self, task: Task) -> None:
        """Have a task computed: when this returns, or later, its result is set.

        Raises:
            MessageTooLargeError: it could never be queued.
            ServerBusyError: the queue is full, or the scheduler is closed.
        """
        if not self._device.acquire(blocking=False):
            self._scheduler.submit(task)
            return
        try:
            if (batch := self._scheduler.submit_or_take(task)) is not None:
                self._run_here(batch)
        finally:
            self._device.release()

    def _loop(self) -> None:
        while self._scheduler.wait():
            self._run_next()

    def _run_next(self) -> None:
        """Run a batch if one is queued; it is let go before the next is waited for."""
        with self._device:
            if (batch := self._scheduler.next_batch(0)) is not None:
                self._run_here(batch)

    def _run_here(self, batch: Batch) -> None:
        """Run a batch in this thread, which has the device."""
        if self._threads and not hasattr(self._of_thread, "prepared"):
            # OpenMP and MKL count per thread: what was set in the main thread does not hold here.
            torch.set_num_threads(self._threads)
            self._of_thread.prepared = True
        self._busy_since_s = time.perf_counter()
        try:
            with torch.no_grad():  # not inference_mode: a block's grad_input needs autograd inside
                self._run(batch)
        except Exception as error:  # whatever it was: one batch fails, the server goes on
            self._give_up(batch, error)
        finally:
            self._busy_since_s = None

    @property
    def busy_since_s(self) -> float | None:
        """Since when the batch under way has been computed, on the clock of `time.perf_counter()`; None if idle."""
        return self._busy_since_s

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
            outputs, computed_s = self._compute(tasks)
        except Exception as error:
            if len(tasks) > 1:
                logger.warning("batch of %d failed together, trying each alone: %s", len(tasks), error)
            else:
                tasks[0].result.set_exception(_as_ours(error))
            return False
        tokens = sum(task.tokens for task in tasks)
        for task, parts in zip(tasks, outputs, strict=True):
            task.result.set_result(Result(parts, started_s - task.enqueued_s, computed_s, len(tasks), tokens))
        batch = Batch(tasks[0].key, tuple(tasks))
        self._scheduler.done(batch, computed_s)
        self._observe(batch, computed_s)
        return True

    def _compute(self, tasks: list[Task]) -> tuple[list[list[torch.Tensor]], float]:
        """Concatenate by tokens -> one operation -> split: N_1 + N_2 + ... rows; and the seconds that it took."""
        started_s = time.perf_counter()
        if len(tasks) == 1:
            inputs = tasks[0].tensors
        else:
            inputs = [torch.cat(column) for column in zip(*(task.tensors for task in tasks), strict=True)]
        key, tokens = tasks[0].key, [task.tokens for task in tasks]
        limit = self._scheduler.slice_tokens(key)
        keep = any(task.keep is not None for task in tasks)
        try:
            results, elsewhere_s = self._sliced(key, inputs, limit or sum(tokens), keep)
        except (torch.OutOfMemoryError, MemoryError):
            logger.warning("%d tokens of %s do not fit in memory, trying halves", sum(tokens), key.op)
            results, elsewhere_s = self._sliced(key, inputs, -(-min(limit or sum(tokens), sum(tokens)) // 2), keep)
        outputs = results[: len(key.outputs)] if keep else results
        if keep:
            self._keep(tasks, inputs, results[len(key.outputs) :])
        parts = zip(*(output.split(tokens) for output in outputs), strict=True) if len(tasks) > 1 else [outputs]
        return [list(part) for part in parts], time.perf_counter() - started_s - elsewhere_s

    def _sliced(self, key: Key, inputs: list[torch.Tensor], limit: int, keep: bool) -> tuple[list[torch.Tensor], float]:
        """What `_operate` gives, computed `limit` rows at a time; and seconds spent on small requests."""
        if inputs[0].shape[0] <= limit:
            return self._operate(key, inputs, keep), 0.0
        slices: list[list[torch.Tensor]] = []
        elsewhere_s = 0.0
        for rows in zip(*(tensor.split(limit) for tensor in inputs), strict=True):
            if slices:
                elsewhere_s += self._let_small_ones_pass()
            slices.append(self._operate(key, list(rows), keep))
        # Not strict: where one slice had no products to keep, none are.
        return [torch.cat(column) for column in zip(*slices, strict=False)], elsewhere_s

    def _let_small_ones_pass(self) -> float:
        started_s = time.perf_counter()
        if (batch := self._scheduler.next_small()) is not None:
            try:
                self._run(batch)
            except Exception as error:
                self._give_up(batch, error)
        return time.perf_counter() - started_s

    def _operate(self, key: Key, inputs: list[torch.Tensor], keep: bool) -> list[torch.Tensor]:
        """Outputs [N, d] on the CPU, in the dtype of the input; then the products to keep of a segment, as they are."""
        loaded = [self._load(tensor) for tensor in inputs]
        products: list[torch.Tensor] = []
        if key.op == "segment_grad":
            outputs = self._run_segment_grad(key, loaded)
        elif key.op == "segment" and keep:
            outputs, products = segment.run_and_keep(self._base, _steps(key), key.outputs, loaded)
        elif key.op == "segment":
            outputs = segment.run(self._base, _steps(key), key.outputs, loaded)
        else:
            outputs = [self._base.run(key.op, key.modules, loaded)]
        return [*(output.to(device="cpu", dtype=inputs[0].dtype) for output in outputs), *products]

    def _keep(self, tasks: list[Task], inputs: list[torch.Tensor], products: list[torch.Tensor]) -> None:
        """Keep each task's rows for the gradient that it announced."""
        tokens = [task.tokens for task in tasks]
        columns = [rows.split(tokens) for rows in (*map(self._load, inputs), *products)]
        for task, rows in zip(tasks, zip(*columns, strict=True), strict=True):
            if task.keep is not None:
                # Rows of a shared batch would keep all of it alive, and borrowed ones change.
                own = rows if len(tasks) == 1 and not task.borrowed else tuple(part.clone() for part in rows)
                self._soft_cache.put(task.keep, Kept(_steps(task.key), own[: len(inputs)], own[len(inputs) :]))

    def _run_segment_grad(self, key: Key, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors are the gradients, then the segment's inputs, then products that were kept."""
        first, last = len(key.outputs), len(tensors) - key.products
        grads, inputs, products = tensors[:first], tensors[first:last], tensors[last:]
        return segment.grad(self._base, _steps(key), key.outputs, key.wrt, grads, inputs, products)

    def _load(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = tensor.dtype if tensor.dtype in (torch.float64, torch.int64) else self._base.dtype
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


def _steps(key: Key) -> tuple[Step, ...]:
    return cast("tuple[Step, ...]", key.steps)


def _as_ours(error: Exception) -> SymbiosisError:
    """Any failure as one of the tree; details stay in the server's log."""
    if isinstance(error, SymbiosisError):
        return error
    logger.error("computing a call failed", exc_info=error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return RemoteOutOfMemoryError("the server's device ran out of memory for this call; send fewer tokens at once")
    return RemoteComputeError(f"the server failed while computing ({type(error).__name__}); its log has the details")
