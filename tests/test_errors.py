"""The error tree: what each class promises to those who catch it, and that its documentation is complete."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path

import pytest

from symbiosis import errors
from symbiosis.errors import SymbiosisError, from_wire

REFERENCE = Path(__file__).parents[1] / "docs" / "errors.md"

# class -> (its code, the standard error that a user would catch, may the call be sent again)
TREE: dict[type[SymbiosisError], tuple[str, type[BaseException], bool]] = {
    errors.SymbiosisError: ("INTERNAL", Exception, False),
    errors.ConfigError: ("CONFIG", ValueError, False),
    errors.MissingExtraError: ("MISSING_EXTRA", ImportError, False),
    errors.ConnectError: ("CONNECT", ConnectionError, True),
    errors.TlsError: ("TLS", ConnectionError, False),
    errors.AuthError: ("AUTH", PermissionError, False),
    errors.PayloadError: ("PAYLOAD", ValueError, False),
    errors.ProtocolError: ("PROTOCOL", ValueError, False),
    errors.ProtocolVersionError: ("PROTOCOL_VERSION", ValueError, False),
    errors.ModelMismatchError: ("MODEL_MISMATCH", ValueError, False),
    errors.UnknownModuleError: ("UNKNOWN_MODULE", LookupError, False),
    errors.InvalidInputError: ("INVALID_INPUT", ValueError, False),
    errors.NeedInputError: ("NEED_INPUT", LookupError, False),
    errors.MessageTooLargeError: ("MESSAGE_TOO_LARGE", ValueError, False),
    errors.ServerBusyError: ("SERVER_BUSY", RuntimeError, True),
    errors.QuotaExceededError: ("QUOTA_EXCEEDED", RuntimeError, True),
    errors.BudgetExceededError: ("BUDGET_EXCEEDED", PermissionError, False),
    errors.DeadlineExceededError: ("DEADLINE_EXCEEDED", TimeoutError, True),
    errors.RemoteComputeError: ("REMOTE_COMPUTE", RuntimeError, False),
    errors.RemoteOutOfMemoryError: ("REMOTE_OUT_OF_MEMORY", MemoryError, True),
    errors.UnsupportedMethodError: ("UNSUPPORTED_METHOD", NotImplementedError, False),
    errors.MasksExhaustedError: ("MASKS_EXHAUSTED", RuntimeError, True),
    errors.PrivacyBudgetError: ("PRIVACY_BUDGET", RuntimeError, False),
    errors.PrivacyCheckError: ("PRIVACY_CHECK", RuntimeError, False),
    errors.WrongReplyError: ("WRONG_REPLY", RuntimeError, False),
    errors.ClosedError: ("CLOSED", RuntimeError, False),
}
CLASSES = pytest.mark.parametrize("cls", TREE, ids=lambda cls: cls.__name__)


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.+)$", REFERENCE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_table_above_is_the_whole_tree() -> None:
    public = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, SymbiosisError)}

    assert set(TREE) == public


def test_codes_are_distinct() -> None:
    codes = [cls.code for cls in TREE]

    assert len(set(codes)) == len(codes)


@CLASSES
def test_a_class_is_also_the_standard_error(cls: type[SymbiosisError]) -> None:
    code, standard, retryable = TREE[cls]

    assert issubclass(cls, standard)
    assert (cls.code, cls.retryable) == (code, retryable)


@CLASSES
def test_an_error_survives_the_wire(cls: type[SymbiosisError]) -> None:
    error = from_wire(cls.code, "what, got, expected, next step", retry_after_s=0.5)

    assert type(error) is cls
    assert str(error) == error.message == "what, got, expected, next step"
    assert error.retry_after_s == 0.5


@CLASSES
@pytest.mark.parametrize("twin", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy], ids=["pickle", "copy"])
def test_an_error_survives_pickle_and_copy(cls, twin) -> None:
    error = twin(cls("the message", retry_after_s=2.0))

    assert type(error) is cls
    assert (str(error), error.retry_after_s) == ("the message", 2.0)


def test_an_unknown_code_keeps_its_name_in_the_message() -> None:
    error = from_wire("FROM_THE_FUTURE", "something new", retry_after_s=1.0)

    assert type(error) is SymbiosisError
    assert str(error) == "FROM_THE_FUTURE: something new"
    assert not error.retryable
    assert error.retry_after_s == 1.0


def test_a_message_is_not_quoted_by_its_standard_base() -> None:
    assert str(errors.UnknownModuleError("no module 'h.0'")) == "no module 'h.0'"


def test_the_reference_has_one_section_per_code_and_no_other() -> None:
    assert list(sections()) == [code for code, _, _ in TREE.values()]


@CLASSES
def test_a_section_says_meaning_cause_and_next_step(cls: type[SymbiosisError]) -> None:
    text = sections()[cls.code]

    for heading in ("**Meaning.**", "**Usual cause.**", "**Next step.**"):
        assert text.count(heading) == 1, f"{cls.code} in docs/errors.md lacks {heading}"


@CLASSES
def test_the_table_of_the_reference_is_true(cls: type[SymbiosisError]) -> None:
    code, standard, retryable = TREE[cls]
    again = "yes" if retryable else "no"
    row = f"| [{code}](#{code.lower()}) | `{cls.__name__}` | `{standard.__name__}` | {again} |"

    assert row in REFERENCE.read_text(encoding="utf-8")


@CLASSES
def test_the_tree_in_the_module_docstring_is_true(cls: type[SymbiosisError]) -> None:
    line = next(line for line in errors.__doc__.splitlines() if re.search(rf"\b{cls.__name__}\b", line))

    # ProtocolVersionError inherits both of its parent's properties; the drawing leaves them out.
    assert ("[r]" in line) == cls.retryable
    if cls not in (SymbiosisError, errors.ProtocolVersionError):
        assert f"({TREE[cls][1].__name__})" in line
