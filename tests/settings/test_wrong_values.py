"""Every setting refuses wrong values from every source, in one line that names the flag, the variable or the key.

The values follow from the declarations, so that a new setting is tested too. The flags of the command line are in
`tests/cli/test_wrong_flags.py`."""

from collections.abc import Iterator
from enum import StrEnum
from itertools import chain
from pathlib import Path

import pytest

from motet.errors import ConfigError
from motet.settings.declaration import Declaration, ServerCommand
from motet.settings.resolve import NOT_SETTINGS, resolve_settings
from motet.settings.server_config import SETTINGS

NEEDED = {"MOTET_WORKERS": "http://a:8000"}
HUGE = "9" * 60
WITHOUT_WRONG_TEXTS = {"kv_events_topic", "allowed_hosts", "cors_origins"}
"""Settings that can be any text, or a list of any texts that are not blank."""
NAMES_OF_PARSERS = {"tool_parser", "reasoning_parser"}
"""Settings that are checked against the known parsers, when the plan of the server is made."""


def wrong_texts(declared: Declaration) -> Iterator[str]:
    """Yields texts that the setting refuses, from the environment and on the command line."""
    kind = declared.flag_kind
    if kind is bool:
        yield from ("maybe", "", "2", "nan")
    elif kind in (int, float):
        yield from ("abc", "", "nan", "inf", "1,5", HUGE, "-" + HUGE, "1e400", "0x10")
        yield from map(str, out_of_range(declared))
        yield from ["1.5"] if kind is int else []
    elif declared.choices or (isinstance(kind, type) and issubclass(kind, StrEnum)):
        yield from ("no-such-choice", "", HUGE)
    elif not declared.is_list:
        yield from (text for text in ("", " ", "http://a:1x", "é\n", "http://") if declared.refusal(text))
    else:
        yield from (
            text for text in ("nowhere", "=", "http://a:1x", "http://=", "a=b:c", "é") if is_refused(declared, text)
        )


def is_refused(declared: Declaration, text: str) -> bool:
    return bool(declared.refusal((text,)))


def out_of_range(declared: Declaration) -> Iterator[float]:
    if declared.above is not None:
        yield from (declared.above, declared.above - 1)
    if declared.minimum is not None:
        yield declared.minimum - 1
    if declared.maximum is not None:
        yield declared.maximum + 1
    if declared.choices:
        yield max(map(float, map(str, declared.choices))) + 1


def wrong_toml(declared: Declaration) -> Iterator[str]:
    """Yields values in TOML that have another type than the setting, or are out of range."""
    kind = declared.flag_kind
    yield from ("{}", "1979-05-27", "[[1]]")
    if kind is bool:
        yield from ('"maybe"', "1", "1.0")
    elif kind in (int, float):
        yield from ('"abc"', '""', "true", "nan", "inf", "[1]", HUGE, *map(str, out_of_range(declared)))
    else:
        yield from ("5", "true", "nan", "[5]")
        yield from (f'"{text}"' for text in wrong_texts(declared) if "\n" not in text)


def refusal(
    command: ServerCommand, *, flags: dict[str, object] | None = None, environ: dict[str, str], file: Path | None = None
) -> str:
    """Returns the error for wrong settings, which must be one line with exit code 2; empty if there is none."""
    try:
        resolve_settings(
            flags or {},
            environ=environ if given_workers(flags, file) else {**NEEDED, **environ},
            file=file,
            command=command,
        )
    except ConfigError as error:
        assert error.exit_code == 2
        assert error.message.isprintable(), error.message
        assert len(error.message) < 700, error.message
        return error.message
    return ""


def given_workers(flags: dict[str, object] | None, file: Path | None) -> bool:
    return "workers" in (flags or {}) or (file is not None and file.read_text().startswith("workers ="))


def settings_of() -> Iterator[tuple[ServerCommand, Declaration]]:
    for declared in SETTINGS.values():
        for command in declared.commands:
            yield command, declared


def test_every_setting_has_a_wrong_text() -> None:
    without = {declared.name for declared in SETTINGS.values() if not list(wrong_texts(declared))}
    assert without == WITHOUT_WRONG_TEXTS | NAMES_OF_PARSERS


@pytest.mark.slow
def test_every_variable_refuses_wrong_values() -> None:
    accepted = [
        (declared.variable, text)
        for command, declared in settings_of()
        for text in wrong_texts(declared)
        if declared.variable not in refusal(command, environ={declared.variable: text})
    ]
    assert accepted == []


@pytest.mark.slow
def test_every_flag_refuses_wrong_values() -> None:
    accepted = [
        (declared.flag, text)
        for command, declared in settings_of()
        if declared.kind is not bool
        for text in wrong_texts(declared)
        if declared.flag
        not in refusal(command, flags={declared.name: [text] if declared.is_list else text}, environ={})
    ]
    assert accepted == []


@pytest.mark.slow
def test_every_key_of_a_file_refuses_wrong_values(tmp_path: Path) -> None:
    cases = [(one.commands[0], one, text) for one in SETTINGS.values() for text in wrong_toml(one)]
    accepted = []
    for number, (command, declared, text) in enumerate(cases):
        file = tmp_path / f"{number}.toml"  # a new file: to overwrite one takes 5 ms on some file systems
        file.write_text(f"{declared.name} = {text}\n")
        message = refusal(command, environ={}, file=file)
        if not (declared.name in message and str(file) in message):
            accepted.append((declared.name, text, message))
    assert accepted == []


def test_secrets_are_in_no_error() -> None:
    secrets = [declared for _, declared in settings_of() if declared.secret]
    assert secrets
    for declared in secrets:
        for command in declared.commands:
            message = refusal(command, environ={declared.variable: "hush-hush\té"})
            assert "hush" not in message, message


@pytest.mark.parametrize("variable", sorted(NOT_SETTINGS - {"MOTET_CACHE_DIR"}))
def test_a_variable_for_a_missing_file_is_named(variable: str) -> None:
    assert f"{variable}=/gone" in refusal(ServerCommand.SERVE, environ={variable: "/gone"})


def test_names_are_unique_enough_for_suggestions() -> None:
    """A misspelled name of every setting suggests that setting, or one that is as similar."""
    for declared in SETTINGS.values():
        misspelled = declared.variable[:-1] + "Q"
        message = refusal(declared.commands[0], environ={misspelled: "1"})
        assert message.startswith(f"{misspelled}: there is no such setting; "), message
    assert len(list(chain(settings_of()))) > 200
