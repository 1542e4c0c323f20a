"""Which Remote hides what a client sends, as `connect(privacy=...)` asks.

One rule: what cannot be hidden is refused here, at connect, or when a model is wrapped; not in the middle of a step.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Protocol

from symbiosis.config import ActivationNoise, Masking, PrivacyOptions
from symbiosis.errors import ConfigError
from symbiosis.privacy.dealer import Pool
from symbiosis.privacy.draws import RING
from symbiosis.privacy.exact import ExactRemote, Ring
from symbiosis.privacy.masking import GRIDS, WHAT_WEAK_DOES_NOT_STOP, MaskedRemote, refuse_unmaskable
from symbiosis.privacy.noise import NoisyRemote
from symbiosis.privacy.shares import Shares
from symbiosis.privacy.verify import RingVerifier, Verifier

if TYPE_CHECKING:
    from symbiosis.flight.protocol import Manifest
    from symbiosis.privacy.dealer import Source
    from symbiosis.sharing import Remote

    class Dealing(Remote, Source, Ring, Protocol):
        """A server that computes and deals; a Caller is one."""


Hiding = ExactRemote | MaskedRemote | NoisyRemote


def check_options(privacy: PrivacyOptions, manifest: Manifest) -> None:
    """Refuse what is not there, or not for this base, before a second server is called.

    Raises:
        ConfigError: not one of ours.
        UnsupportedMethodError: a base that cannot be hidden from its server so.
    """
    if isinstance(privacy, Masking):
        refuse_unmaskable(privacy, manifest)
    elif not isinstance(privacy, ActivationNoise):
        raise ConfigError(f"privacy={privacy!r}; expected symbiosis.privacy.Masking(...) or ActivationNoise(...)")


def hide(privacy: PrivacyOptions, manifest: Manifest, server: Dealing, dealer: Dealing, timeout_s: float) -> Hiding:
    """A Remote around `server` that hides what it sends.

    Args:
        privacy: as checked by `check_options`.
        manifest: what the server serves.
        dealer: computes the effects of masks; the server itself where masks are weak.
        timeout_s: how long a call waits for masks.

    Raises:
        UnsupportedMethodError: a base that cannot be hidden so.
        MissingExtraError: scipy, for noise, is not installed.
    """
    modules = {info.name: info for info in manifest.modules}
    if isinstance(privacy, ActivationNoise):
        noisy = NoisyRemote(server, modules, privacy)
        noisy.check(manifest)
        return noisy
    assert isinstance(privacy, Masking)
    if privacy.dealer is None:
        warnings.warn(WHAT_WEAK_DOES_NOT_STOP, UserWarning, stacklevel=5)
    if privacy.mode == "exact":
        masks = Pool(dealer, RING, privacy.pool_bytes, timeout_s, privacy.when_empty)
        verifier = RingVerifier(dealer, modules) if privacy.verify else None
        return ExactRemote(server, modules, masks, dealer, privacy, verifier)
    grid = GRIDS[privacy.precision]
    pool: Pool | Shares
    if privacy.mode == "shares":
        pool = Shares(dealer, grid, timeout_s)
    else:
        pool = Pool(dealer, grid, privacy.pool_bytes, timeout_s, privacy.when_empty)
    return MaskedRemote(server, modules, pool, privacy, Verifier(dealer) if privacy.verify else None)
