"""A coverage-guided fuzzer (atheris) on every decoder: `python -m tests.faults.fuzz [SECONDS]`.

What comes from a peer is header bytes and a record batch. Any bytes may give a result or one of our errors; anything
else, a crash or an input that takes more than 10 s is a finding. Inputs that reached new code are kept in
`tests/faults/corpus/`, which `test_fuzz.py` runs through the decoders without atheris.
"""

from __future__ import annotations

import sys
from pathlib import Path

CORPUS = Path(__file__).with_name("corpus")


def run(seconds: int) -> None:
    import atheris

    with atheris.instrument_imports(include=["symbiosis.flight.protocol", "symbiosis.errors"]):
        from tests.faults.decoders import SEEDS, decode_everything
    CORPUS.mkdir(exist_ok=True)
    for i, seed in enumerate(SEEDS):
        (CORPUS / f"good-{i:02}").write_bytes(seed)
    options = [
        f"-max_total_time={seconds}",
        "-timeout=10",
        "-max_len=4096",
        "-rss_limit_mb=4096",
        "-print_final_stats=1",
    ]
    atheris.Setup([sys.argv[0], str(CORPUS), *options], decode_everything)
    atheris.Fuzz()


if __name__ == "__main__":
    run(int(sys.argv[1]) if len(sys.argv) > 1 else 600)
