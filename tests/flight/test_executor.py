"""Batches on a real base model: equal to single results, and every task fails alone.

Tolerance: a GEMM's rounding depends on the number of rows that it multiplies, so rows of a batch equal rows of a
single call to fp32 rounding of sums of 32 to 56 products, 1e-5, not bit for bit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from symbiosis.errors import (
    DeadlineExceededError,
    InvalidInputError,
    RemoteComputeError,
    RemoteOutOfMemoryError,
)
from symbiosis.flight.base_model import BaseModel
from symbiosis.flight.executor import Executor, Result
from symbiosis.flight.protocol import TAGS, Step
from symbiosis.flight.scheduler import Batch, Key, Scheduler, Task

TOLERANCE = 1e-5
LAYER = "model.layers.0"
Q, K, MLP = f"{LAYER}.self_attn.q_proj", f"{LAYER}.self_attn.k_proj", f"{LAYER}.mlp"


@pytest.fixture(scope="module")
def base(tiny_llama: Callable[..., nn.Module]) -> BaseModel:
    return BaseModel(tiny_llama())


@pytest.fixture
def compute() -> Iterator[Callable[..., list[Any]]]:
    """compute(base, tasks): all are queued before the executor starts; each one's Result or error."""
    with ExitStack() as stack:

        def run(base: Any, tasks: list[Task], **options: Any) -> list[Any]:
            scheduler = Scheduler()
            executor = Executor(base, scheduler, **options)
            for task in tasks:
                scheduler.submit(task)
            executor.start()
            stack.callback(executor.join, 5)
            stack.callback(scheduler.close)
            return [task.result.exception(timeout=10) or task.result.result() for task in tasks]

        yield run


def task(op: str, modules: tuple[str, ...], *tensors: torch.Tensor, **fields: Any) -> Task:
    key = Key(op, modules, TAGS[tensors[0].dtype], fields.pop("steps", ()), fields.pop("outputs", ()))
    nbytes = sum(tensor.nbytes for tensor in tensors)
    defaults = {"enqueued_s": time.perf_counter(), "deadline_s": time.perf_counter() + 60}
    return Task(key=key, tokens=len(tensors[0]), nbytes=nbytes, tensors=list(tensors), **{**defaults, **fields})


def direct(base: BaseModel, one: Task) -> torch.Tensor:
    with torch.no_grad():
        return base.run(one.key.op, one.key.modules, one.tensors)


OPERATIONS: dict[str, Callable[[int], Task]] = {
    "forward of linears": lambda n: task("forward", (Q, K), torch.randn(n, 32)),
    "grad_input of linears": lambda n: task("grad_input", (Q, K), torch.randn(n, 72)),
    "forward of a block": lambda n: task("forward", (MLP,), torch.randn(n, 32)),
    "grad_input of a block": lambda n: task("grad_input", (MLP,), torch.randn(n, 32), torch.randn(n, 32)),
}


# --- together -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", OPERATIONS.values(), ids=OPERATIONS)
def test_requests_for_the_same_modules_are_computed_as_one(
    make: Callable[[int], Task], base: BaseModel, compute: Callable[..., list[Any]]
) -> None:
    tasks = [make(5), make(0), make(1), make(3)]

    results = compute(base, tasks)

    for one, result in zip(tasks, results, strict=True):
        assert isinstance(result, Result)
        assert (result.batch_requests, result.batch_tokens) == (4, 9)
        (output,) = result.outputs
        torch.testing.assert_close(output, direct(base, one), rtol=TOLERANCE, atol=TOLERANCE)


def test_segments_of_the_same_steps_are_computed_as_one(base: BaseModel, compute: Callable[..., list[Any]]) -> None:
    steps = (Step("call", (MLP,), (0,)), Step("add", (), (0, 1)))
    tasks = [task("segment", (), torch.randn(n, 32), steps=steps, outputs=(1, 2)) for n in (2, 4)]

    results = compute(base, tasks)

    for one, result in zip(tasks, results, strict=True):
        assert result.batch_requests == 2
        x = one.tensors[0]
        y = direct(base, task("forward", (MLP,), x))
        torch.testing.assert_close(result.outputs, [y, x + y], rtol=TOLERANCE, atol=TOLERANCE)


def test_other_ops_and_dtypes_are_not_mixed(base: BaseModel, compute: Callable[..., list[Any]]) -> None:
    x = torch.randn(3, 32)
    tasks = [
        task("forward", (Q,), x),
        task("grad_input", (Q,), torch.randn(3, 48)),
        task("forward", (Q,), x.bfloat16()),
        task("forward", (Q,), x.half()),
        task("forward", (K,), x),
        task("forward", (Q, K), x),
    ]

    results = compute(base, tasks)

    assert [result.batch_requests for result in results] == [1] * 6
    assert [result.outputs[0].dtype for result in results[:4]] == [
        torch.float32, torch.float32, torch.bfloat16, torch.float16,
    ]  # fmt: skip


def test_narrow_dtypes_are_computed_in_the_dtype_of_the_weights(
    base: BaseModel, compute: Callable[..., list[Any]]
) -> None:
    x = torch.randn(3, 32).bfloat16()

    (result,) = compute(base, [task("forward", (Q,), x)])

    # fp32 inside, rounded once at the end.
    expected = (x.float() @ base.linears[Q].weight.t()).bfloat16()
    torch.testing.assert_close(result.outputs[0], expected, rtol=2**-8, atol=1e-6)  # one bit: ties after fp32 rounding


def test_zero_rows_alone(base: BaseModel, compute: Callable[..., list[Any]]) -> None:
    results = compute(base, [make(0) for make in OPERATIONS.values()])

    assert [tuple(result.outputs[0].shape) for result in results] == [(0, 72), (0, 32), (0, 32), (0, 32)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("make", OPERATIONS.values(), ids=OPERATIONS)
def test_values_that_are_not_finite_reach_only_their_own_rows(
    bad: float, make: Callable[[int], Task], base: BaseModel, compute: Callable[..., list[Any]]
) -> None:
    healthy, sick, other = make(3), make(2), make(1)
    for tensor in sick.tensors:
        tensor[0].fill_(bad)

    results = compute(base, [healthy, sick, other])

    assert [result.batch_requests for result in results] == [3, 3, 3]
    for one, result in ((healthy, results[0]), (other, results[2])):
        torch.testing.assert_close(result.outputs[0], direct(base, one), rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(
        results[1].outputs[0][1:], direct(base, sick)[1:], rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True
    )  # nor the other row of the same request
    assert not results[1].outputs[0][0].isfinite().all()


# --- alone --------------------------------------------------------------------------------------------------------


class Fragile:
    """A base that cannot compute what holds a 13; counts what it was asked."""

    dtype, device = torch.float32, torch.device("cpu")

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error or ValueError("unlucky")
        self.calls: list[int] = []

    def run(self, op: str, modules: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
        self.calls.append(len(tensors[0]))
        if (tensors[0] == 13).any():
            raise self.error
        return 2 * tensors[0]


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)


@pytest.fixture
def errors_expected(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.CRITICAL + 1, logger="symbiosis.flight.executor")
    return caplog


@pytest.mark.usefixtures("errors_expected")
def test_a_task_that_fails_inside_a_batch_fails_alone(compute: Callable[..., list[Any]]) -> None:
    base = Fragile()

    first, bad, last = compute(base, [task("forward", ("m",), rows(*v)) for v in ([1, 2], [13], [3])])

    assert torch.equal(first.outputs[0], rows(2, 4))
    assert isinstance(bad, RemoteComputeError)
    assert torch.equal(last.outputs[0], rows(6))
    assert base.calls == [4, 2, 1, 1]  # together, then one by one


@pytest.mark.usefixtures("errors_expected")
@pytest.mark.parametrize(
    ("raised", "answered"),
    [
        (ValueError("secret path /root/weights"), RemoteComputeError),
        (RuntimeError("CUDA error: device-side assert"), RemoteComputeError),
        (MemoryError(), RemoteOutOfMemoryError),
        (torch.OutOfMemoryError("CUDA out of memory"), RemoteOutOfMemoryError),
        (InvalidInputError("of ours"), InvalidInputError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_a_failure_is_answered_as_one_of_ours_without_details(
    raised: Exception, answered: type[Exception], compute: Callable[..., list[Any]]
) -> None:
    (error,) = compute(Fragile(raised), [task("forward", ("m",), rows(13))])

    assert type(error) is answered
    assert "secret" not in str(error)
    assert "CUDA" not in str(error)


@pytest.mark.usefixtures("errors_expected")
def test_the_executor_lives_on_after_a_failure(compute: Callable[..., list[Any]]) -> None:
    scheduler = Scheduler()
    executor = Executor(Fragile(), scheduler)  # type: ignore[arg-type]
    executor.start()
    for value in (13, 1, 13, 2):
        one = task("forward", ("m",), rows(value))
        scheduler.submit(one)
        assert (one.result.exception(timeout=5) is not None) == (value == 13)
    scheduler.close()

    assert executor.join(5)


def test_tensors_that_do_not_fit_together_are_computed_one_by_one(
    base: BaseModel, compute: Callable[..., list[Any]], errors_expected: pytest.LogCaptureFixture
) -> None:
    steps = (Step("scale", (), (0,), 3.0),)  # right for any width, so one key has two widths
    tasks = [task("segment", (), torch.ones(2, width), steps=steps, outputs=(1,)) for width in (4, 5)]

    results = compute(base, tasks)

    assert [tuple(result.outputs[0].shape) for result in results] == [(2, 4), (2, 5)]


# --- too late -----------------------------------------------------------------------------------------------------


def test_a_deadline_that_passed_in_the_queue_is_not_computed(compute: Callable[..., list[Any]]) -> None:
    base = Fragile()
    now_s = time.perf_counter()
    late = task("forward", ("m",), rows(1), enqueued_s=now_s - 2, deadline_s=now_s - 1)

    error, result = compute(base, [late, task("forward", ("m",), rows(2))])

    assert isinstance(error, DeadlineExceededError)
    assert "waited 2." in str(error)
    assert torch.equal(result.outputs[0], rows(4))
    assert base.calls == [1]


@pytest.mark.parametrize("late_s", [-60, 1], ids=["in_time", "late"])
def test_a_cancelled_task_is_not_computed_and_stops_nothing(late_s: float) -> None:
    base = Fragile()
    cancelled = task("forward", ("m",), rows(1), deadline_s=time.perf_counter() - late_s)
    cancelled.result.cancel()
    scheduler = Scheduler()
    executor = Executor(base, scheduler)  # type: ignore[arg-type]
    wanted = task("forward", ("m",), rows(2))
    scheduler.submit(cancelled)
    scheduler.submit(wanted)
    executor.start()

    assert wanted.result.result(5).batch_requests == 1
    scheduler.close()
    assert executor.join(5)


# --- accounts -----------------------------------------------------------------------------------------------------


def test_queue_and_compute_time_are_measured_apart(compute: Callable[..., list[Any]]) -> None:
    class Slow(Fragile):
        def run(self, op: str, modules: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
            time.sleep(0.05)
            return super().run(op, modules, tensors)

    (result,) = compute(Slow(), [task("forward", ("m",), rows(1), enqueued_s=time.perf_counter() - 0.5)])

    assert 0.05 <= result.compute_s < 0.5
    assert 0.5 <= result.queue_s < 1.0


def test_each_batch_is_observed_once(compute: Callable[..., list[Any]]) -> None:
    seen: list[tuple[int, int, float]] = []
    observed = threading.Event()

    def observe(batch: Batch, seconds: float) -> None:
        seen.append((len(batch.tasks), batch.tokens, seconds))
        observed.set()

    compute(Fragile(), [task("forward", ("m",), rows(1, 2)), task("forward", ("m",), rows(3))], observe=observe)

    assert observed.wait(5)
    assert [(requests, tokens) for requests, tokens, _ in seen] == [(2, 3)]
    assert seen[0][2] >= 0


def test_a_client_that_is_alone_is_computed_for_in_its_own_thread(base: BaseModel) -> None:
    """Also with a number of threads that is not this thread's; the executor's own thread is not even started."""
    executor = Executor(base, Scheduler(), threads=1)
    ours = [task("forward", (Q,), torch.randn(2, 32), client="a") for _ in range(3)]
    for one in ours:
        executor.submit(one)
        assert one.result.done()

    assert all(torch.equal(one.result.result().outputs[0], direct(base, one)) for one in ours)
    assert ours[0].result.result().batch_requests == 1
    assert torch.is_grad_enabled()


def test_a_client_that_is_alone_gets_its_error_and_the_server_goes_on(
    errors_expected: pytest.LogCaptureFixture,
) -> None:
    executor = Executor(Fragile(), Scheduler())  # type: ignore[arg-type]
    bad, good = task("forward", ("m",), rows(13), client="a"), task("forward", ("m",), rows(1), client="a")
    executor.submit(bad)
    executor.submit(good)

    assert isinstance(bad.result.exception(0), RemoteComputeError)
    assert good.result.result(0).batch_requests == 1
    assert executor.busy_since_s is None


def test_two_clients_go_through_the_queue(base: BaseModel) -> None:
    scheduler = Scheduler()
    executor = Executor(base, scheduler)
    first, second, third = (task("forward", (Q,), torch.randn(1, 32), client=name) for name in ("a", "b", "a"))
    executor.submit(first)
    executor.submit(second)
    executor.submit(third)

    assert [one.result.done() for one in (first, second, third)] == [True, False, False]
    assert scheduler.queued == 2
    executor.start()
    assert second.result.result(10).batch_requests == third.result.result(10).batch_requests == 2
    scheduler.close()
    assert executor.join(5)


def test_join_waits_for_what_is_computed_in_a_clients_thread() -> None:
    begun, release = threading.Event(), threading.Event()

    class Slow(Fragile):
        def run(self, op: str, modules: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
            begun.set()
            release.wait(10)
            return tensors[0]

    scheduler = Scheduler()
    executor = Executor(Slow(), scheduler)  # type: ignore[arg-type]
    executor.start()
    one = task("forward", ("m",), rows(1), client="a")
    client = threading.Thread(target=executor.submit, args=(one,))
    client.start()
    assert begun.wait(5)
    scheduler.close()

    assert not executor.join(0.1)
    release.set()
    assert executor.join(5)
    assert one.result.done()
    client.join(5)


def test_the_executor_ends_when_the_scheduler_is_closed_and_empty(base: BaseModel) -> None:
    scheduler = Scheduler()
    executor = Executor(base, scheduler)
    accepted = task("forward", (Q,), torch.randn(2, 32))
    scheduler.submit(accepted)
    scheduler.close()
    executor.start()

    assert executor.join(5)
    assert accepted.result.done()


def test_join_tells_when_work_is_left() -> None:
    release = threading.Event()

    class Stuck(Fragile):
        def run(self, op: str, modules: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
            release.wait(10)
            return tensors[0]

    scheduler = Scheduler()
    executor = Executor(Stuck(), scheduler)  # type: ignore[arg-type]
    executor.start()
    scheduler.submit(task("forward", ("m",), rows(1)))
    scheduler.close()

    assert not executor.join(0.1)
    release.set()
    assert executor.join(5)


def test_outputs_belong_to_their_task_alone(base: BaseModel, compute: Callable[..., list[Any]]) -> None:
    tasks = [task("forward", (Q,), torch.randn(2, 32)) for _ in range(2)]
    first, second = compute(base, tasks)
    before = second.outputs[0].clone()

    first.outputs[0].zero_()

    assert torch.equal(second.outputs[0], before)


# --- large batches -------------------------------------------------------------------------------------------------


def forward(tokens: int) -> Task:
    return task("forward", (Q, K), torch.randn(tokens, 32))


@torch.no_grad()
def test_a_large_batch_lets_small_requests_pass_and_is_still_right(base: BaseModel) -> None:
    scheduler = Scheduler()
    executor = Executor(base, scheduler)
    order: list[int] = []
    large, smalls = forward(1000), [forward(2) for _ in range(3)]
    for one in (large, *smalls):
        one.result.add_done_callback(lambda _, tokens=one.tokens: order.append(tokens))
    scheduler.submit(smalls[0])  # small requests are about
    executor._run(scheduler.next_batch())
    scheduler.submit(large)
    batch = scheduler.next_batch()
    scheduler.submit(smalls[1])
    scheduler.submit(smalls[2])

    executor._run(batch)

    assert order == [2, 2, 2, 1000]
    for one in (large, *smalls):
        (output,) = one.result.result(0).outputs
        torch.testing.assert_close(output, direct(base, one), rtol=TOLERANCE, atol=TOLERANCE)
    assert large.result.result(0).batch_requests == 1


@torch.no_grad()
@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")], ids=["host", "device"])
def test_what_does_not_fit_in_memory_is_computed_in_halves(
    error: Exception, base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rows, one = base.run, [], forward(101)
    expected = direct(base, one)

    def small_device(op: str, modules: Any, tensors: list[torch.Tensor]) -> torch.Tensor:
        rows.append(len(tensors[0]))
        if rows[-1] > 60:
            raise error
        return run(op, modules, tensors)

    monkeypatch.setattr(base, "run", small_device)
    scheduler = Scheduler()
    scheduler.submit(one)

    Executor(base, scheduler)._run(scheduler.next_batch())

    assert rows == [101, 51, 50]
    torch.testing.assert_close(one.result.result(0).outputs[0], expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_it_says_how_long_it_has_been_busy(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()
    run = base.run

    def slow(*arguments: Any) -> torch.Tensor:
        entered.set()
        leave.wait(10)
        return run(*arguments)

    monkeypatch.setattr(base, "run", slow)
    scheduler = Scheduler()
    executor = Executor(base, scheduler)
    assert executor.busy_since_s is None
    executor.start()
    scheduler.submit(one := forward(1))
    assert entered.wait(10)
    assert executor.busy_since_s is not None
    assert executor.busy_since_s <= time.perf_counter()
    leave.set()
    one.result.result(10)
    scheduler.close()
    assert executor.join(10)
    assert executor.busy_since_s is None
