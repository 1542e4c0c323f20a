"""How options are read, laid over one another and refused; which options there are is in config.py.

One rule: a value travels with the place it was found (`Setting`), so that every error can name it:

    --port on the command line: got 'x', expected a valid integer, unable to parse string as an integer

All of `SYMBIOSIS_*` is ours, so an unknown variable, like an unknown key, flag or keyword, is a `ConfigError`
that suggests the nearest name. Values of unknown names are not repeated: they may be mistyped secrets.

Rejected: pydantic-settings. It merges the sources before it validates, so an error cannot say where a bad
value came from; it skips unknown variables; and it takes 0.2 s more to import. pydantic validates.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from symbiosis.errors import ConfigError

ENV_PREFIX = "SYMBIOSIS_"
MAX_SHOWN_CHARS = 80  # of a bad value in an error


@dataclass(frozen=True)
class Setting:
    """A value on its way into an options object, and where it was found, in words."""

    value: object
    where: str


class Options(BaseModel):
    """Base of an options object: frozen, no unknown names, one line per problem."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, allow_inf_nan=False)
    env_prefix: ClassVar[str] = ENV_PREFIX

    if not TYPE_CHECKING:  # type checkers keep the signature that the fields give

        def __init__(self, **values: object) -> None:
            self._fill(values, None)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Setting]) -> Self:
        """Validate what `collect` found.

        Raises:
            ConfigError: one line per bad or missing value, each with the place it came from.
        """
        options = cls.__new__(cls)
        options._fill({name: setting.value for name, setting in settings.items()}, settings)
        return options

    @classmethod
    def collect(
        cls,
        explicit: Mapping[str, Setting],
        config: str | Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> dict[str, Setting]:
        """Lay the explicit settings over the environment's, and those over the file's.

        Args:
            explicit: field name -> setting, from a command line or from keyword arguments.
            config: a TOML file; None means the one that the environment names, if any.
            environ: os.environ when None.

        Raises:
            ConfigError: an unknown variable or key, or a file that cannot be read.
        """
        environment = _read_environment(cls, os.environ if environ is None else environ)
        named = environment.pop("config", None)
        path = str(named.value) if config is None and named else config
        return {**(_read_file(cls, Path(path)) if path is not None else {}), **environment, **explicit}

    @classmethod
    def env_name(cls, name: str) -> str:
        """The environment variable of an option."""
        return cls.env_prefix + name.upper()

    @classmethod
    def is_secret(cls, name: str) -> bool:
        """True for an option whose value no message, log or repr may show."""
        field = cls.model_fields.get(name)
        return field is not None and SecretStr in (field.annotation, *get_args(field.annotation))

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_empty(cls, value: object) -> object:
        # `--port-file "$UNSET"` would otherwise mean the current directory.
        if value == "":
            raise ValueError("expected a value; leave the option out for its default")
        return value

    def _fill(self, values: dict[str, object], settings: Mapping[str, Setting] | None) -> None:
        try:
            BaseModel.__init__(self, **values)
            return
        except ValidationError as error:
            problems = [_explain(type(self), detail, settings) for detail in error.errors(include_url=False)]
        # Outside the except block: pydantic's error holds the values, so it must not become our context.
        raise ConfigError("\n".join(problems))


def to_toml(options: Options, settings: Mapping[str, Setting]) -> str:
    """The effective options as a file that --config accepts, the source of each value behind it."""
    return "\n".join(_toml_line(options, name, settings.get(name)) for name in type(options).model_fields)


def did_you_mean(word: str, known: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """End of an error about an unknown name: the nearest known one, or all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(word.lower(), names, n=1)
    return f"did you mean {spell(near[0])}?" if near else "known are: " + ", ".join(map(spell, names))


def _read_environment(cls: type[Options], environ: Mapping[str, str]) -> dict[str, Setting]:
    known = _known_variables()
    ours = {name: value for name, value in environ.items() if name.startswith(ENV_PREFIX)}
    problems = [
        f"{name} in the environment: unknown variable; "
        + did_you_mean(name.removeprefix(ENV_PREFIX), known, lambda near: ENV_PREFIX + near.upper())
        for name in sorted(ours)
        if name.removeprefix(ENV_PREFIX).lower() not in known
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    variables = {name: cls.env_name(name) for name in ("config", *cls.model_fields)}
    return {
        name: Setting(ours[variable], f"{variable} in the environment")
        for name, variable in variables.items()
        if ours.get(variable)
    }


def _known_variables() -> set[str]:
    """Names behind ENV_PREFIX, in lower case, of client and server: one environment may serve both."""
    return {
        cls.env_name(name).removeprefix(ENV_PREFIX).lower()
        for cls in Options.__subclasses__()
        for name in ("config", *cls.model_fields)
    }


def _read_file(cls: type[Options], path: Path) -> dict[str, Setting]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"config file {path}: cannot be read: {error.strerror}; check the path") from error
    except ValueError as error:
        raise ConfigError(f"config file {path}: not valid TOML: {error}") from error
    problems = [
        f"{key} in {path}: unknown key; " + did_you_mean(key, cls.model_fields)
        for key in table
        if key not in cls.model_fields
    ]
    if problems:
        raise ConfigError("\n".join(problems))
    return {key: Setting(value, f"{key} in {path}") for key, value in table.items()}


def _explain(cls: type[Options], detail: ErrorDetails, settings: Mapping[str, Setting] | None) -> str:
    """One line about one problem that pydantic found; the only place that reads pydantic's errors."""
    name = str(detail["loc"][0]) if detail["loc"] else ""
    where = settings[name].where if settings and name in settings else name
    if detail["type"] == "missing":
        return f"{name} is required" + ("" if settings is None else _ways_to_give(cls, name))
    if detail["type"] == "extra_forbidden":
        return f"{where}: unknown option of {cls.__name__}; {did_you_mean(name, cls.model_fields)}"
    if not name:
        return _expectation(detail)
    if cls.is_secret(name):
        return f"{where}: {_expectation(detail)}"
    hint = _nearest_choice(cls, name, detail)
    return f"{where}: got {_shown(detail['input'])}, {_expectation(detail)}{hint}"


def _ways_to_give(cls: type[Options], name: str) -> str:
    return f": give it as an argument, as {cls.env_name(name)} in the environment or as {name} in a config file"


def _expectation(detail: ErrorDetails) -> str:
    if detail["type"] == "value_error":  # raised by a validator of ours: a sentence already
        return str(detail["ctx"]["error"])
    return re.sub(r"^Input should be ", "expected ", detail["msg"])


def _nearest_choice(cls: type[Options], name: str, detail: ErrorDetails) -> str:
    if detail["type"] != "literal_error":
        return ""
    near = difflib.get_close_matches(str(detail["input"]).lower(), choices(cls.model_fields[name]), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The values that an option allows, where they are a closed list; else empty."""
    alternatives = (field.annotation, *get_args(field.annotation))  # Literal[...], or Literal[...] | None
    return tuple(arg for one in alternatives for arg in get_args(one) if isinstance(arg, str))


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."


def _toml_line(options: Options, name: str, setting: Setting | None) -> str:
    value = getattr(options, name)
    source = f"  # {setting.where if setting else 'default'}"
    if value is None:
        return f"# {name} is not set"
    if options.is_secret(name):
        return f"# {name} = {json.dumps(str(value))}{source}"
    literal = value if isinstance(value, bool | int | float) else str(value)
    return f"{name} = {json.dumps(literal, ensure_ascii=False)}{source}"
