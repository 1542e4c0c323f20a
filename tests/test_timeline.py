"""Sums over time: rates, pauses, thinning, and what is left of a training."""

from __future__ import annotations

import pytest

from symbiosis.telemetry import Stats, StepEvent
from symbiosis.timeline import MAX_POINTS, PARTS, Timeline, Training


def sums(calls: int, wall_s: float = 0.0, local_s: float = 0.0, **more: float) -> Stats:
    return Stats(calls=calls, model_tokens=10 * calls, wall_s=wall_s, local_s=local_s, **more)  # type: ignore[arg-type]


def test_a_rate_is_a_difference_over_time() -> None:
    timeline = Timeline()
    timeline.add(100.0, sums(0))
    timeline.add(102.0, sums(6))
    timeline.add(104.0, sums(16))

    assert [i.rate("calls") for i in timeline.intervals()] == [3.0, 5.0]
    assert timeline.recent(1.0).rate("calls") == 5.0
    assert timeline.recent(60.0).rate("model_tokens") == 40.0


def test_a_window_goes_back_at_least_as_far_as_it_says() -> None:
    timeline = Timeline()
    for second, calls in enumerate((0, 0, 12, 12, 12, 24)):  # a pulse every three seconds
        timeline.add(float(second), sums(calls))

    assert [i.rate("calls") for i in timeline.windows(3.0)] == [0.0, 6.0, 4.0, 4.0, 4.0]
    assert timeline.windows(3.0)[-1] == timeline.recent(3.0)


def test_a_pause_does_not_count() -> None:
    timeline = Timeline()
    timeline.add(0.0, sums(0))
    timeline.add(1.0, sums(5))
    timeline.resume(500.0)  # somebody read what came out
    timeline.add(501.0, sums(10, wall_s=501.0, local_s=500.0))

    assert [i.seconds for i in timeline.intervals()] == [1.0, 1.0]
    # One second was spent in calls, and nothing else of this second's time is left for local work.
    assert timeline.intervals()[-1].parts()[0] == 0.0


def test_parts_make_up_the_interval() -> None:
    timeline = Timeline()
    timeline.add(0.0, Stats())
    timeline.add(10.0, Stats(1, wall_s=9.0, local_s=3.0, serialise_s=1.0, network_s=2.0, queue_s=1.0, compute_s=2.0))

    (interval,) = timeline.intervals()
    assert dict(zip(PARTS, interval.parts(), strict=True)) == {
        "local": 4.0,
        "serialise": 1.0,
        "network": 2.0,
        "queue": 1.0,
        "compute": 2.0,
        "retry": 0.0,
    }
    assert sum(interval.parts()) == interval.seconds


def test_a_long_timeline_is_thinned_and_loses_no_call() -> None:
    timeline = Timeline()
    for n in range(5000):
        timeline.add(float(n), sums(n))

    assert len(timeline.snapshots) <= MAX_POINTS
    assert sum(i.stats.calls for i in timeline.intervals()) == 4999
    assert timeline.recent(5.0).rate("calls") == pytest.approx(1.0)  # the latest are never thinned


def test_nothing_yet_is_no_error() -> None:
    assert Timeline().recent(5.0).rate("calls") == 0.0
    assert Training().remaining_s() is None


def step(number: int, steps: int | None = 10) -> StepEvent:
    return StepEvent(number, 1.0 / number, ended_s=2.0 * number, tokens=100, steps=steps)


def test_the_time_left_follows_the_mean_step() -> None:
    training = Training()
    for number in range(1, 5):
        training.add(step(number), sums(number))

    assert training.step_s() == 2.0
    assert training.remaining_s() == 12.0  # six more
    assert training.tokens == 400
    assert [i.stats.calls for i in training.intervals()] == [1, 1, 1]


def test_thinned_steps_still_tell_the_time_of_one() -> None:
    training = Training()
    for number in range(1, 1001):
        training.add(step(number, 1000), sums(number, wall_s=2.0 * number, compute_s=1.5 * number))

    assert len(training.steps) <= MAX_POINTS
    assert {round(i.seconds, 6) for i in training.intervals()} == {2.0}
    assert {round(i.parts()[4], 6) for i in training.intervals()} == {1.5}
    assert training.step_s() == 2.0


def test_a_lower_step_begins_another_training() -> None:
    training = Training()
    for number in (1, 2, 3, 1):
        training.add(step(number), sums(1))

    assert len(training.steps) == 1
    assert training.tokens == 100
    assert training.remaining_s() is None


def test_without_a_number_of_steps_no_time_is_promised() -> None:
    training = Training()
    for number in (1, 2):
        training.add(step(number, steps=None), sums(1))

    assert training.remaining_s() is None
