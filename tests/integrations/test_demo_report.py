"""What the demo prints, from numbers that are easy to check by hand."""

from __future__ import annotations

import io

from symbiosis.integrations import demo_report
from symbiosis.integrations.demo_events import Failure, Measured, Progress, Result, decode, encode
from symbiosis.integrations.demo_progress import Board
from symbiosis.integrations.demo_report import Outcome
from symbiosis.telemetry import Stats


def result(method: str, after: float, answer: str) -> Result:
    return Result(
        method=method,
        adapter_dir=f"adapters/{method}",
        training_pairs=672,
        held_out_pairs=64,
        before=Measured(4.0, ["I am a\nlarge one."]),
        after=Measured(after, [answer]),
        steps=10,
        started_s=100.0 if method == "lora" else 105.0,
        ended_s=160.0 if method == "lora" else 162.0,
        stats=Stats(
            wall_s=20.0, local_s=8.0, serialise_s=1.0, network_s=2.0, queue_s=3.0, compute_s=6.0, mean_batch=1.5
        ),
        loaded_bytes=200_000_000,
        peak_bytes=700_000_000,
        base_bytes=538_000_000,
    )


def outcome(local: str = "No.") -> Outcome:
    results = [result("lora", 3.0, "No."), result("ia3", 3.2, "Never.")]
    answers = {"adapters/lora": [local], "adapters/ia3": ["Never."]}
    return Outcome(results, ["Do you eat"], answers, 200.0)


def test_losses_are_shown_before_after_and_as_a_change() -> None:
    assert demo_report.losses(outcome()) == [
        "Loss per answer token on 64 held-out pairs; no training pair asks their questions",
        "        before  after  change",
        "  LoRA   4.000  3.000  -25.0%",
        "  IA3    4.000  3.200  -20.0%",
    ]


def test_each_answer_is_one_line() -> None:
    assert demo_report.answers(outcome())[1:] == [
        "  Do you eat",
        "    base  I am a large one.",
        "    LoRA  No.",
        "    IA3   Never.",
    ]


def test_an_adapter_that_answers_differently_without_us_is_shouted_about() -> None:
    assert "\n".join(demo_report.adapters(outcome())).count("the same answers") == 2
    text = "\n".join(demo_report.adapters(outcome(local="Yes.")))
    assert "OTHER ANSWERS" in text
    assert "LoRA alone: ['Yes.']" in text


def test_memory_of_clients_stands_beside_the_base() -> None:
    lines = demo_report.memory(outcome())
    assert lines[2].split() == ["base", "538", "MB"]
    assert lines[3].split() == ["LoRA", "200", "MB", "700", "MB"]


def test_times_are_per_step_and_sum_up() -> None:
    lines = demo_report.times(outcome())
    assert "both clients trained at once for 55 s" in lines[0]
    assert lines[2].split() == ["LoRA", "2,000", "800", "100", "200", "300", "600", "1.50"]


def test_the_report_fits_a_terminal() -> None:
    assert max(map(len, demo_report.report(outcome()).splitlines())) <= 110


def test_events_survive_the_pipe() -> None:
    for event in (Progress("training", 1, 9, 0.5), Failure("CONNECT", "gone"), result("ia3", 3.0, "é\n")):
        line = encode(event)
        assert "\n" not in line
        assert decode(line) == event


def test_without_a_terminal_progress_is_one_line_per_phase() -> None:
    stream = io.StringIO()
    board = Board(["LoRA", "IA3"], stream)
    for done in range(3):
        board.show("LoRA", Progress("training", done, 9, 2.0))
        board.show("IA3", Progress("loss before", done, 9))
    board.close()
    assert stream.getvalue().splitlines() == [
        "  LoRA  training         0/9  loss 2.000",
        "  IA3   loss before      0/9",
    ]


def test_on_a_terminal_both_clients_have_a_bar() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    board = Board(["LoRA", "IA3"], stream)
    board.show("LoRA", Progress("training", 3, 9, 2.0))
    board.show("IA3", Progress("loss before", 1, 9))
    board.close()
    assert "LoRA  training       |" in stream.getvalue()
    assert "3/9" in stream.getvalue()
    assert "loss 2.000" in stream.getvalue()
