from __future__ import annotations

import logging
import threading
from xml.dom import minidom

import pytest

from symbiosis.telemetry import CallEvent, Epsilon, EventBus, Recorder, Stats, StepEvent


def event(started_s: float = 0.0, ended_s: float = 1.0, **changes: object) -> CallEvent:
    fields: dict[str, object] = {
        "op": "forward",
        "modules": ("m",),
        "tokens": 10,
        "bytes_out": 100,
        "bytes_in": 200,
        "serialise_s": 0.1,
        "queue_s": 0.2,
        "compute_s": 0.3,
        "batch_requests": 1,
        **changes,
    }
    return CallEvent(started_s=started_s, ended_s=ended_s, **fields)  # type: ignore[arg-type]


def recorded(*events: CallEvent) -> Stats:
    recorder = Recorder()
    for one in events:
        recorder.record(one)
    return recorder.stats()


def test_model_tokens_count_each_token_once_however_many_calls_carry_it() -> None:
    training = [
        event(modules=("q", "k", "v")),
        event(modules=("o",)),
        event(modules=("o",), op="grad_input"),
        event(modules=("o",), op="segment_grad"),
    ]
    decoding = [event(modules=("q", "k", "v"), tokens=1), event(op="segment", modules=("o", "norm", "mlp"), tokens=1)]

    assert recorded(*training).model_tokens == 10
    assert recorded(*training, *decoding).model_tokens == 11
    assert (recorded(*training, *decoding) - recorded(*training)).model_tokens == 1


def test_a_sum_of_stats_is_that_of_all_calls() -> None:
    early, late = recorded(event()), recorded(event(batch_requests=3), event(batch_requests=3))

    assert (early + late).calls == 3
    assert (early + late).mean_batch == pytest.approx(7 / 3)


def test_a_recorder_leaves_training_steps_to_others() -> None:
    recorder = Recorder()
    recorder.record(StepEvent(step=1, loss=0.5, ended_s=1.0))

    assert recorder.stats() == Stats()


# --- events ------------------------------------------------------------------------------------------------------


def test_the_epsilon_of_the_last_step_that_told_it_is_kept() -> None:
    recorder = Recorder()
    assert recorder.stats().epsilon is None
    recorder.record(StepEvent(1, 2.0, 1.0, epsilon=Epsilon(1.5, 8.0, 1e-5)))
    before = recorder.stats()
    recorder.record(StepEvent(2, 2.0, 2.0, epsilon=Epsilon(2.25, 8.0, 1e-5)))
    recorder.record(StepEvent(3, 2.0, 3.0))

    between = recorder.stats() - before
    assert between.epsilon == Epsilon(2.25, 8.0, 1e-5)
    assert ("epsilon", "2.250 of 8, delta 1e-05") in between.rows()
    recorder.reset()
    assert recorder.stats().epsilon is None


def test_network_is_what_neither_end_accounts_for() -> None:
    assert event().elapsed_s == 1.0
    assert event().network_s == pytest.approx(0.4)  # 1 - 0.1 - 0.2 - 0.3


def test_network_is_never_negative() -> None:
    # The clocks of two machines may make the parts larger than the whole.
    assert event(compute_s=5.0).network_s == 0.0


def test_events_are_frozen() -> None:
    with pytest.raises(AttributeError):
        event().tokens = 3  # type: ignore[misc]


def test_every_subscriber_gets_every_event() -> None:
    bus, first, second = EventBus(), [], []
    bus.subscribe(first.append)
    bus.emit(event(tokens=1))
    bus.subscribe(second.append)
    bus.emit(event(tokens=2))

    assert [e.tokens for e in first] == [1, 2]
    assert [e.tokens for e in second] == [2]


def test_unsubscribing_removes_that_handler_only_and_may_be_repeated() -> None:
    bus, first, second = EventBus(), [], []
    remove = bus.subscribe(first.append)
    bus.subscribe(second.append)

    remove()
    remove()
    bus.emit(event())

    assert (len(first), len(second)) == (0, 1)


def test_a_subscriber_that_raises_is_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    bus, seen = EventBus(), []
    calls: list[CallEvent] = []

    def broken(one: CallEvent) -> None:
        calls.append(one)
        raise RuntimeError("subscriber is broken")

    bus.subscribe(broken)
    bus.subscribe(seen.append)
    with caplog.at_level(logging.WARNING):
        bus.emit(event())
        bus.emit(event())

    assert len(calls) == 1
    assert len(seen) == 2
    assert len(caplog.records) == 1
    assert "broken" in caplog.text


def test_a_subscriber_may_unsubscribe_while_it_handles_an_event() -> None:
    bus, seen = EventBus(), []

    def once(one: CallEvent) -> None:
        seen.append(one)
        remove()

    remove = bus.subscribe(once)
    bus.emit(event())
    bus.emit(event())

    assert len(seen) == 1


# --- sums --------------------------------------------------------------------------------------------------------


def test_no_calls_give_zeros() -> None:
    assert recorded() == Stats()
    assert "calls" in str(Stats())


def test_counters_add_up() -> None:
    stats = recorded(event(0, 1, batch_requests=3), event(2, 3, tokens=5, bytes_out=1, bytes_in=2))

    assert (stats.calls, stats.tokens, stats.bytes_out, stats.bytes_in) == (2, 15, 101, 202)
    assert stats.mean_batch == 2.0
    assert (stats.serialise_s, stats.queue_s, stats.compute_s) == pytest.approx((0.2, 0.4, 0.6))


def test_local_time_is_the_wall_time_outside_calls() -> None:
    stats = recorded(event(10, 11), event(14, 16))

    assert stats.wall_s == 6.0
    assert stats.local_s == 3.0  # from 11 to 14


def test_overlapping_calls_of_two_threads_count_once() -> None:
    # Events arrive when calls end: 0-4 and 1-3 overlap, 3.5-6 begins before the first has ended.
    stats = recorded(event(1, 3), event(0, 4), event(3.5, 6))

    assert stats.wall_s == 6.0
    assert stats.local_s == 0.0


def test_a_call_that_began_before_the_first_reported_one_counts_from_its_start() -> None:
    # Two threads: the call that began first is reported last.
    stats = recorded(event(2, 3), event(0, 4))

    assert stats.wall_s == 4.0
    assert stats.local_s == 0.0


def test_reset_begins_again() -> None:
    recorder = Recorder()
    recorder.record(event(0, 1))
    recorder.reset()
    recorder.record(event(100, 101))

    assert recorder.stats().calls == 1
    assert recorder.stats().wall_s == 1.0


def test_threads_lose_no_event() -> None:
    recorder = Recorder()
    threads = [
        threading.Thread(target=lambda: [recorder.record(event(tokens=1)) for _ in range(500)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (recorder.stats().calls, recorder.stats().tokens) == (2000, 2000)


def test_subtracting_two_stats_gives_the_time_between() -> None:
    recorder = Recorder()
    recorder.record(event(0, 1, batch_requests=1))
    before = recorder.stats()
    recorder.record(event(2, 3, batch_requests=4, tokens=7))
    recorder.record(event(4, 5, batch_requests=2, tokens=7))

    between = recorder.stats() - before

    assert (between.calls, between.tokens) == (2, 14)
    assert between.wall_s == 4.0
    assert between.local_s == 2.0
    assert between.mean_batch == 3.0


def test_the_difference_of_equal_stats_is_nothing() -> None:
    stats = recorded(event())

    assert stats - stats == Stats()


# --- for people --------------------------------------------------------------------------------------------------


def test_text_names_every_share() -> None:
    text = str(recorded(event(0, 1), event(3, 4)))

    for label in ("calls", "tokens", "sent", "received", "mean batch", "wall", "local", "serialise", "network"):
        assert label in text
    assert "local      2.000 s   50.0%" in text


def test_html_is_well_formed_and_has_the_same_rows() -> None:
    stats = recorded(event())
    document = minidom.parseString(stats._repr_html_())

    labels = [cell.firstChild.data for cell in document.getElementsByTagName("th")]
    assert labels == [label for label, _ in stats.rows()]
