"""fill_masks: wait until a connection's masks are dealt ahead, with a bar.

One rule: it only looks. Masks are dealt by the pool's own thread, whether somebody watches or not, and the bar is
drawn by the thread that waits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from symbiosis.errors import ConfigError, DeadlineExceededError, MasksExhaustedError
from symbiosis.privacy.exact import ExactRemote
from symbiosis.privacy.masking import MaskedRemote

if TYPE_CHECKING:
    from symbiosis.privacy.dealer import PoolStats

POLL_S = 0.1


def fill_masks(connection: Any, timeout_s: float = 600.0) -> PoolStats:
    """Wait until no more masks are dealt ahead; what was never used, or once only, has none ahead.

    Args:
        connection: with `privacy=Masking(dealer=...)`, after a few steps or tokens.
        timeout_s: how long to wait.

    Returns:
        How the pool is doing.

    Raises:
        ConfigError: a connection that keeps no masks ahead, or is closed.
        MasksExhaustedError: the dealer failed.
        DeadlineExceededError: it took longer.
    """
    privacy = connection.privacy
    if not isinstance(privacy, MaskedRemote | ExactRemote) or privacy.options.mode == "shares":
        raise ConfigError(
            f"{connection!r} keeps no masks ahead; connect with privacy=symbiosis.privacy.Masking(dealer=URL), and no "
            "mode='shares'"
        )
    pool, started_s = privacy.stats().pool, time.monotonic()
    with tqdm(total=pool.wanted_rows, desc="dealing masks", unit="row", unit_scale=True, leave=False, delay=1) as bar:
        while pool.state == "dealing":
            if time.monotonic() - started_s > timeout_s:
                raise DeadlineExceededError(
                    f"{pool.rows:,} of {pool.wanted_rows:,} rows of masks were dealt within timeout_s={timeout_s:g}; "
                    "wait on, or go on: a call waits for the masks that it needs"
                )
            time.sleep(POLL_S)
            pool = privacy.stats().pool
            bar.total = pool.wanted_rows
            bar.update(pool.rows - bar.n)
    if pool.state == "failed":
        raise MasksExhaustedError(
            f"the dealer failed, and {pool.rows:,} of {pool.wanted_rows:,} rows of masks are there; the next call "
            "tries again, and says why if it fails"
        )
    if pool.state == "closed":
        raise ConfigError(f"{connection!r} is closed, and its masks were thrown away; connect again")
    return pool
