"""The server that an `LLM` starts for itself: its settings as keyword arguments, and its process.

The settings of `motet serve` have the names of docs/settings.md, of their flags, or of the flags of `vllm serve` that
Motet knows (`settings.vllm_flags`). All are checked before the process starts. This process downloads the model, so
that it can show the progress: on a terminal, or as lines of the log at the level INFO."""

import difflib
import json
import logging
import os
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from motet.deploy.child import ChildServer
from motet.errors import ConfigError, StartupError
from motet.models.model_source import check_download_name, local_folder, resolve
from motet.models.progress import Lines, Progress
from motet.models.progress_bars import terminal_progress
from motet.settings.declaration import Declaration, ServerCommand
from motet.settings.record import Settings
from motet.settings.resolve import MIN_LIKENESS, arguments_of, converted, names_of, resolve_settings, secrets_of
from motet.settings.server_config import SETTINGS, cache_folder, environment
from motet.settings.vllm_flags import ADVICE, ALIASES, NUMBER, SWITCH, UNUSED, listed
from motet.system.machine import described_end

HOST: Final = "127.0.0.1"
"""Address of the server: a loopback address, which other machines cannot reach."""
RESERVED: Final = ("host", "port", "api_keys", "uds", "root_path", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs")
"""Settings of the address and the keys of a server, which an `LLM` chooses."""
QUIET: Final[Mapping[str, object]] = {"log_level": "warning", "trust_request_chat_template": True}
"""Defaults that differ from `motet serve`: the log is only read after a failure, and the only client of the server can
choose the chat template."""
START_TIMEOUT_S: Final = 900.0
"""Maximum time from the download of the model until the server is ready."""

logger = logging.getLogger(__name__)

_running: "weakref.WeakSet[LLMServer]" = weakref.WeakSet()
"""The servers of this process, which a forked process must release."""


class ServerSettings:
    """The settings of a server of one `LLM`. Raises ConfigError for a name or a value that `motet serve` refuses."""

    def __init__(self, settings: Mapping[str, object], *, environ: Mapping[str, str] | None = None) -> None:
        given = environment() if environ is None else environ
        reserved = {SETTINGS[name].variable for name in RESERVED}
        self._environ = {name: value for name, value in given.items() if name not in reserved}
        values = dict(settings)
        config = values.pop("config", None)
        if not isinstance(config, str | Path | None):
            raise ConfigError(f"config={config!r}: must be the path of a TOML file")
        self._config = None if config is None else Path(config)
        self._chosen: dict[str, object] = {}
        for keyword, value in values.items():
            if value is not None and not is_unused(keyword, value):
                self._choose(keyword, value)
        resolved = resolve_settings(self._chosen, environ=self._environ, file=self._config)
        self.model, self._revision = resolved.model.model, resolved.model.revision
        self.shows_start = resolved.rows["log_level"].value in ("debug", "info")
        """True if a terminal shows how the server starts."""
        self._add_quiet(resolved)
        if not Path(self.model).expanduser().is_dir():
            check_download_name(self.model)
        for name in RESERVED:
            if name in ("uds", "ssl_certfile") and resolved.rows[name].value is not None:
                raise ConfigError(f"{resolved.rows[name].as_given}: {_REFUSED}")

    def download(self, progress: Progress) -> None:
        """Downloads the model if it is not on this machine. Raises ModelLoadError."""
        cache = cache_folder(self._environ)
        if self._revision is not None or local_folder(self.model, cache=cache) is None:
            resolve(self.model, cache=cache, revision=self._revision, progress=progress)

    def arguments(self) -> list[str]:
        """Returns the command line after `motet serve`, without secrets."""
        return arguments_of({"host": HOST, **self._chosen}, config=self._config)

    def environ(self, *, api_key: str, admin_key: str) -> dict[str, str]:
        """Returns the environment of the server, with the secrets. `admin_key`: used if the program has chosen none."""
        return {**self._environ, **secrets_of({"api_keys": api_key, "admin_key": admin_key, **self._chosen})}

    def _choose(self, keyword: str, value: object) -> None:
        name = setting_named(keyword)
        declared = SETTINGS[name]
        value = plain_value(declared, value)
        shown = f"{keyword}={'...' if declared.secret else repr(value)}"
        if isinstance(value, str) and declared.flag_kind is not str and not declared.is_list:
            raise ConfigError(f"{shown}: must be {declared.requirement}")
        typed = converted(name, value, shown=shown)
        if refusal := declared.refusal(typed):
            raise ConfigError(f"{shown}: {refusal}")
        self._chosen[name] = typed

    def _add_quiet(self, resolved: Settings) -> None:
        for name, value in QUIET.items():
            if resolved.rows[name].is_default:
                self._chosen[name] = value


_REFUSED: Final = "an LLM chooses the address and the key of its server: start `motet serve` and give LLM(url=...)"


def plain_value(declared: Declaration, value: object) -> object:
    """Returns a value of Python in the form in which the command line has it: JSON for mappings, texts for paths."""
    if declared.name == "dtype":
        return str(value).removeprefix("torch.")
    if declared.is_list:
        items = [value] if isinstance(value, str | Mapping) else value
        if not isinstance(items, list | tuple):
            return value
        return listed([json.dumps(item) if isinstance(item, Mapping) else str(item) for item in items])
    if isinstance(value, Mapping):
        return json.dumps(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return str(value) if isinstance(value, Path) or (declared.kind is str and is_number) else value


def setting_named(keyword: str) -> str:
    """Returns the name of the setting that a keyword names. Raises ConfigError for an unknown one.

    >>> setting_named("dtype"), setting_named("threads"), setting_named("enable_prefix_caching")
    ('dtype', 'num_threads', 'prefix_cache')
    """
    name = _KEYWORDS.get(keyword)
    if name in RESERVED:
        raise ConfigError(f"{keyword}: {_REFUSED}")
    if name is not None:
        return name
    flag = "--" + keyword.replace("_", "-")
    if advice := ADVICE.get(flag):
        raise ConfigError(f"{keyword}: {advice}")
    near = difflib.get_close_matches(keyword, _KEYWORDS, n=1, cutoff=MIN_LIKENESS)
    hint = f"did you mean {near[0]}?" if near else "docs/python.md and docs/settings.md list the settings"
    raise ConfigError(f"{keyword}: there is no such setting; {hint}")


def is_unused(keyword: str, value: object) -> bool:
    """Returns True for a setting of vLLM that changes nothing here. Raises ConfigError for a value that would."""
    flag = "--" + keyword.replace("_", "-")
    if flag == "--trust-remote-code" and value is False:
        return True
    accepted = UNUSED.get(flag)
    if accepted is None:
        return False
    if accepted == SWITCH and value is not True and f"--no-{flag[2:]}" in ADVICE:
        raise ConfigError(f"{keyword}={value!r}: {ADVICE[f'--no-{flag[2:]}']}")
    is_number = accepted == NUMBER and isinstance(value, int) and value >= 1
    if accepted == SWITCH or is_number or str(value) == accepted:
        return True
    raise ConfigError(f"{keyword}={value!r}: {ADVICE.get(flag, f'it can only be {accepted}')}")


def _keywords(declared: Declaration) -> list[str]:
    """Returns the keywords of a setting: its name, and its flags as names."""
    alias = ALIASES.get(declared.name, "").partition("/")[0]
    flags = [declared.flag_for(True), declared.flag, *filter(None, [alias])]
    return [declared.name, *(flag.removeprefix("--").replace("-", "_") for flag in flags if "--no-" not in flag)]


_KEYWORDS: Final[Mapping[str, str]] = {
    keyword: name for name in names_of(ServerCommand.SERVE) for keyword in _keywords(SETTINGS[name])
}


class LLMServer:
    """`motet serve` as a child process that ends with this process. Can be started and closed from any thread."""

    def __init__(
        self,
        settings: ServerSettings,
        *,
        start_timeout_s: float = START_TIMEOUT_S,
        child: Callable[..., ChildServer] = ChildServer,
    ) -> None:
        self._settings = settings
        self.api_key = secrets.token_urlsafe(32)
        environ = settings.environ(api_key=self.api_key, admin_key=secrets.token_urlsafe(32))
        self.admin_key = environ[SETTINGS["admin_key"].variable]
        self._child = child(
            settings.arguments(), environ=environ, start_timeout_s=start_timeout_s, timeout_name="start_timeout_s"
        )
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._has_started = False
        self._is_closed = False

    @property
    def url(self) -> str:
        """Empty before the server is ready."""
        return self._child.url

    @property
    def pid(self) -> int:
        return self._child.pid

    def start(self) -> None:
        """Downloads the model, starts the server and waits until it is ready. Does nothing if the server has started.
        Raises StartupError."""
        is_shown = self._settings.shows_start and sys.stderr is not None and sys.stderr.isatty()
        progress = terminal_progress(logger.info) if is_shown else Lines(logger.info)
        if not (self._has_started or self._is_closed):
            self._settings.download(progress)
        with self._lock:
            if self._is_closed:
                raise StartupError("the LLM is closed")
            if not self._has_started:
                started_s = time.monotonic()
                with progress.stage(f"loading {self._settings.model}"):
                    self._child.__enter__()
                self._has_started = True
                _running.add(self)
                logger.info("%s is ready after %.1f s", self._settings.model, time.monotonic() - started_s)

    def gone(self) -> str:
        """Returns why the server cannot respond again; empty if it runs."""
        if self._is_closed:
            return "the LLM is closed"
        if os.getpid() != self._pid or (code := self._child.exit_code) is None:
            return ""
        last_lines = "\n".join(self._child.log.splitlines()[-10:])
        return f"the server of this LLM {described_end(code)}:\n{last_lines}"

    def close(self) -> None:
        """Ends the server and waits for its end. In a forked process, only this process stops using it."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            is_running, self._is_closed = self._has_started and not self._is_closed, True
            if is_running:
                self._child.__exit__()

    def release(self) -> None:
        """Called in a forked process: see `ChildServer.release`."""
        self._child.release()


def _release_all() -> None:
    for server in list(_running):
        server.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_release_all)
