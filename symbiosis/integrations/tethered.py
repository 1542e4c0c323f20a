"""`python -m symbiosis.integrations.tethered MODULE ARGS...`: run a module that must not outlive who started it.

One rule: it ends when its standard input does. The other end of that pipe is held by the parent alone, so the kernel
closes it however the parent went, SIGKILL included; a handler in the parent could not promise that. Rejected:
PR_SET_PDEATHSIG, which only Linux has and which follows the thread that started us, not the process.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time

GRACE_S = 15.0  # a server drains for 10 s


def main() -> None:
    """Run the module that the command line names, as `python -m` would."""
    threading.Thread(target=_end_with, args=(sys.stdin.fileno(),), name="symbiosis-tether", daemon=True).start()
    module = sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _end_with(pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
