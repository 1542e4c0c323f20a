"""The one error tree. Every failure a user can meet is one of these.

    SymbiosisError
    ├── ConfigError               (ValueError)           an option is unknown, malformed or contradictory
    ├── MissingExtraError         (ImportError)          a package that this path needs is not installed
    ├── ConnectError              (ConnectionError)  [r] the server cannot be reached, or went away
    ├── TlsError                  (ConnectionError)      no trusted encrypted connection came about
    ├── AuthError                 (PermissionError)      credentials missing, refused or not supported
    ├── PayloadError              (ValueError)           an encrypted message that is not what was sent
    ├── ProtocolError             (ValueError)           a frame that the peer should not have sent
    │   └── ProtocolVersionError                         the two ends speak different protocol versions
    ├── ModelMismatchError        (ValueError)           client and server do not hold the same base model
    ├── UnknownModuleError        (LookupError)          the server does not serve a module of that name
    ├── InvalidInputError         (ValueError)           wrong width, dtype, shape or value in a tensor
    ├── NeedInputError            (LookupError)          a gradient needs inputs that the server no longer keeps
    ├── MessageTooLargeError      (ValueError)           one message exceeds the agreed limit
    ├── ServerBusyError           (RuntimeError)     [r] queue full or draining; carries retry_after_s
    ├── QuotaExceededError        (RuntimeError)     [r] over the tenant's quota; carries retry_after_s
    ├── BudgetExceededError       (PermissionError)      over the extraction budget of a module
    ├── DeadlineExceededError     (TimeoutError)     [r] no reply within the deadline
    ├── RemoteComputeError        (RuntimeError)         the server failed while computing
    │   └── RemoteOutOfMemoryError (MemoryError)     [r] the server's device ran out of memory
    ├── UnsupportedMethodError    (NotImplementedError)  needs base weights, which stay on the server
    ├── MasksExhaustedError       (RuntimeError)     [r] no masks are left, and nothing goes out unmasked
    ├── PrivacyBudgetError        (RuntimeError)         sending this again would show more than was allowed
    ├── PrivacyCheckError         (RuntimeError)         a private step could not be shown to be right
    ├── WrongReplyError           (RuntimeError)         a reply is not what the base's weights give
    └── ClosedError               (RuntimeError)         the connection was closed by its owner

[r] marks `retryable`: the call is a pure function of its request, so sending it again is safe.
Each class has a wire `code`; `from_wire` is the only place that turns a code back into a class, and
an error that crossed the wire never carries a traceback of the other side.
"""

from __future__ import annotations

from collections.abc import Iterator


class SymbiosisError(Exception):
    """Base of the tree.

    Attributes:
        code: name of this kind of failure on the wire and in docs/errors.md.
        retryable: sending the same call again is safe and may succeed.
        retry_after_s: how long to wait first, when the server said so.
    """

    code = "INTERNAL"
    retryable = False

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        # KeyError-like bases would quote the message; ours reads as a sentence everywhere.
        return self.message

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.retry_after_s))


class ConfigError(SymbiosisError, ValueError):
    """An option is unknown, malformed, contradictory, or not available in this version."""

    code = "CONFIG"


class MissingExtraError(SymbiosisError, ImportError):
    """A package that this path needs is not installed; the message holds the command that brings it."""

    code = "MISSING_EXTRA"


class ConnectError(SymbiosisError, ConnectionError):
    """The server cannot be reached, or the connection to it broke."""

    code = "CONNECT"
    retryable = True


class TlsError(SymbiosisError, ConnectionError):
    """No connection came about that both ends trust: a certificate, a pin, or one end without TLS."""

    code = "TLS"


class AuthError(SymbiosisError, PermissionError):
    """Credentials are missing, refused, or cannot be checked by this server."""

    code = "AUTH"


class PayloadError(SymbiosisError, ValueError):
    """Payload encryption: not offered, asked for, or a message that does not authenticate."""

    code = "PAYLOAD"


class ProtocolError(SymbiosisError, ValueError):
    """A frame does not follow docs/protocol.md."""

    code = "PROTOCOL"


class ProtocolVersionError(ProtocolError):
    """The two ends speak different versions of the protocol."""

    code = "PROTOCOL_VERSION"


class ModelMismatchError(SymbiosisError, ValueError):
    """The client's base model is not the one that the server holds."""

    code = "MODEL_MISMATCH"


class UnknownModuleError(SymbiosisError, LookupError):
    """The server does not serve a module of that name."""

    code = "UNKNOWN_MODULE"


class InvalidInputError(SymbiosisError, ValueError):
    """A tensor has the wrong width, dtype, shape, or holds values that cannot be computed with."""

    code = "INVALID_INPUT"


class NeedInputError(SymbiosisError, LookupError):
    """The server no longer keeps what a gradient is computed from; the client sends it, unseen by its user."""

    code = "NEED_INPUT"


class MessageTooLargeError(SymbiosisError, ValueError):
    """One message exceeds the limit agreed at connect."""

    code = "MESSAGE_TOO_LARGE"


class ServerBusyError(SymbiosisError, RuntimeError):
    """The server's queue is full, or it is draining; `retry_after_s` says when to come back."""

    code = "SERVER_BUSY"
    retryable = True


class QuotaExceededError(SymbiosisError, RuntimeError):
    """The tenant's quota is used up for now; `retry_after_s` says when to come back."""

    code = "QUOTA_EXCEEDED"
    retryable = True


class BudgetExceededError(SymbiosisError, PermissionError):
    """The tenant has sent as many rows to a module as the operator allows."""

    code = "BUDGET_EXCEEDED"


class DeadlineExceededError(SymbiosisError, TimeoutError):
    """No reply came within the deadline."""

    code = "DEADLINE_EXCEEDED"
    retryable = True


class RemoteComputeError(SymbiosisError, RuntimeError):
    """The server failed while computing; its log has the details under the call id."""

    code = "REMOTE_COMPUTE"


class RemoteOutOfMemoryError(RemoteComputeError, MemoryError):
    """The server's device ran out of memory for this call."""

    code = "REMOTE_OUT_OF_MEMORY"
    retryable = True


class UnsupportedMethodError(SymbiosisError, NotImplementedError):
    """The operation needs the values of base weights, which never leave the server."""

    code = "UNSUPPORTED_METHOD"


class MasksExhaustedError(SymbiosisError, RuntimeError):
    """The pool holds too few masks for a call; it was not sent."""

    code = "MASKS_EXHAUSTED"
    retryable = True


class PrivacyBudgetError(SymbiosisError, RuntimeError):
    """What was to be sent would show more than the budget allows; it was not sent."""

    code = "PRIVACY_BUDGET"


class PrivacyCheckError(SymbiosisError, RuntimeError):
    """DP-SGD's per-sample gradients are missing or wrong; the step was not taken."""

    code = "PRIVACY_CHECK"


class WrongReplyError(SymbiosisError, RuntimeError):
    """A server's reply failed its check: it is not what the base's weights give."""

    code = "WRONG_REPLY"


class ClosedError(SymbiosisError, RuntimeError):
    """The connection was closed by its owner."""

    code = "CLOSED"


def _rebuild(cls: type[SymbiosisError], message: str, retry_after_s: float | None) -> SymbiosisError:
    return cls(message, retry_after_s=retry_after_s)


def _tree(root: type[SymbiosisError]) -> Iterator[type[SymbiosisError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


def from_wire(code: str, message: str, retry_after_s: float | None = None) -> SymbiosisError:
    """Rebuild the error that a reply names; an unknown code becomes the base class, code in the text."""
    for cls in _tree(SymbiosisError):
        if cls.code == code:
            return cls(message, retry_after_s=retry_after_s)
    return SymbiosisError(f"{code}: {message}", retry_after_s=retry_after_s)
