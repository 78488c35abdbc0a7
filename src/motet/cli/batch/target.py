"""The server of `motet batch`: a running one, or one that this command starts, and restarts if it ends."""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from motet.batch.run import BatchProgress
from motet.deploy.child import SHOWN_LOG_LINES, START_TIMEOUT_S, ChildServer
from motet.errors import BatchStoppedError, ConfigError
from motet.log import notice
from motet.models.model_source import resolve
from motet.models.progress_bars import terminal_progress
from motet.settings.declaration import Panel
from motet.settings.resolve import arguments_of, resolve_settings, secrets_of
from motet.settings.server_config import SETTINGS, cache_folder, environment
from motet.settings.server_url import url_of_flag
from motet.system.machine import described_end

API_KEYS = "api_keys"
CHOSEN_HERE = frozenset(
    {
        *(API_KEYS, "host", "port", "uds", "root_path", "role", "prefill_urls", "page", "batch_dir"),
        *(name for name, one in SETTINGS.items() if one.panel is Panel.TLS),
    }
)
"""Settings of a server that are not flags of this command, since only this command uses the server."""
MAX_FRUITLESS_STARTS = 3
"""Number of times that a server is started again without a result between the starts."""

StartServer = Callable[..., ChildServer]


class NamedServer:
    """A server that the user has started."""

    def __init__(self, url: str, given: Mapping[str, object], *, api_key: str | None) -> None:
        """`given`: settings of the command line. Raises ConfigError if there are any, or if `url` is not a URL."""
        if given:
            names = ", ".join(sorted(SETTINGS[name].flag for name in given))
            raise ConfigError(f"--url names a running server: omit the model and settings of a server ({names})")
        self._url = url_of_flag(url)
        first = environment().get(SETTINGS[API_KEYS].variable, "").partition(",")[0].strip()
        self.api_key = api_key or first or None

    @property
    def url(self) -> str:
        return self._url

    def start(self, progress: BatchProgress, stack: ExitStack) -> None:
        """Does nothing: the server runs."""

    async def revive(self) -> None:
        """Does nothing: the server belongs to the user, who restarts it."""


class OwnServer:
    """`motet serve` as a child process. Engines restart inside the server; this class restarts the server itself."""

    def __init__(
        self,
        given: Mapping[str, object],
        config: Path | None,
        *,
        start_timeout_s: float,
        start: StartServer = ChildServer,
    ) -> None:
        """`given`: settings of the command line. Raises ConfigError if they are wrong."""
        variables = {SETTINGS[name].variable for name in CHOSEN_HERE}
        environ = {name: value for name, value in environment().items() if name not in variables}
        settings = resolve_settings(given, environ=environ, file=config)
        self._model = settings.model
        self.api_key = secrets.token_hex(16)
        self._environ = environ | secrets_of({**given, API_KEYS: self.api_key})
        self._arguments = arguments_of({"host": "127.0.0.1", **given}, config=config)
        self._start_timeout_s = max(start_timeout_s, START_TIMEOUT_S)
        self._start = start
        self._progress = BatchProgress(0)
        self._num_fruitless = self._last_num_answered = 0

    @property
    def url(self) -> str:
        return self._child.url

    def start(self, progress: BatchProgress, stack: ExitStack) -> None:
        """Downloads the model if necessary, and starts the server until `stack` closes."""
        self._progress = progress
        name, shown = self._model.model, terminal_progress(notice)
        resolve(name, cache=cache_folder(environment()), revision=self._model.revision, progress=shown)
        with shown.stage(f"starting a server with {name}"):
            self._child = self._started()
        stack.callback(lambda: self._child.__exit__())

    async def revive(self) -> None:
        """Starts the server again if it has ended. Only one call runs at a time. Raises BatchStoppedError if it ends
        again and again without results, and StartupError if it cannot start."""
        if (code := self._child.exit_code) is None:
            return
        num_answered = self._progress.num_completed + self._progress.num_failed
        self._num_fruitless = self._num_fruitless + 1 if num_answered == self._last_num_answered else 0
        self._last_num_answered = num_answered
        if self._num_fruitless > MAX_FRUITLESS_STARTS:
            log = "\n".join(self._child.log.splitlines()[-SHOWN_LOG_LINES:])
            raise BatchStoppedError(
                f"the server {described_end(code)} {self._num_fruitless} times without a result:\n{log}"
            )
        notice(f"the server {described_end(code)}: starting it again")
        self._child.__exit__()
        self._child = await asyncio.to_thread(self._started)

    def _started(self) -> ChildServer:
        server = self._start(
            self._arguments,
            environ=self._environ,
            start_timeout_s=self._start_timeout_s,
            timeout_name="--server-timeout",
        )
        return server.__enter__()


ServerTarget = NamedServer | OwnServer


def server_target(
    url: str | None, given: Mapping[str, object], *, config: Path | None, api_key: str | None, start_timeout_s: float
) -> ServerTarget:
    """Returns the server at `url`, or a server of this command if that is None. `given`: settings of the command line.
    Raises ConfigError."""
    if url is not None:
        return NamedServer(url, given, api_key=api_key)
    if api_key is not None:
        raise ConfigError("--api-key is the key of a server at --url; a server of this command has a random key")
    return OwnServer(given, config, start_timeout_s=start_timeout_s)
