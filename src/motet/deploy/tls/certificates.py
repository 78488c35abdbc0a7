"""The certificates that a server shows to clients and workers, and the certificates that it accepts.

SIGHUP reads all files again. New connections use the new certificates, open connections continue. If a file cannot be
used, the server logs the reason and keeps the certificates that it has."""

import asyncio
import contextlib
import logging
import signal
import ssl
from collections.abc import Iterator

from motet.errors import ConfigError
from motet.settings.tls_config import TlsConfig

logger = logging.getLogger(__name__)

RELOAD_SIGNAL = getattr(signal, "SIGHUP", None)
"""None on Windows, where certificates are read once."""
HTTP = "http/1.1"
NO_PASSWORD = b""
"""Password of private keys: without one, OpenSSL would request it on the terminal."""


class Certificates:
    """The TLS contexts of one server, made from the files of its settings."""

    def __init__(self, config: TlsConfig) -> None:
        """Raises ConfigError with the flag of a file that cannot be used."""
        self._config = config
        self._for_clients = _server_context(config)
        self._for_workers = _client_context(config)

    @property
    def for_clients(self) -> ssl.SSLContext | None:
        """Context of new connections from clients; None for HTTP without TLS."""
        return self._for_clients

    @property
    def for_workers(self) -> ssl.SSLContext | None:
        """Context of connections to workers at https URLs; None to trust the system's certificates, without a
        certificate of this server."""
        return self._for_workers

    def reload(self) -> None:
        """Reads all files again. Raises ConfigError; then the certificates do not change."""
        for_clients, checked = _server_context(self._config), _client_context(self._config)
        self._for_clients = for_clients
        if self._for_workers is not None and checked is not None:
            # The HTTP client keeps its context, so this context gets the new certificates.
            _load_client_files(self._for_workers, self._config)

    @contextlib.contextmanager
    def reloaded_on_signal(self) -> Iterator[None]:
        """Reloads the certificates at each SIGHUP while the context is entered. Without certificates SIGHUP keeps its
        effect. Must be called in the event loop."""
        used = self._for_clients is not None or self._for_workers is not None
        if RELOAD_SIGNAL is None or not used:
            yield
            return
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(RELOAD_SIGNAL, self._reload_or_log)
        try:
            yield
        finally:
            loop.remove_signal_handler(RELOAD_SIGNAL)

    def _reload_or_log(self) -> None:
        try:
            self.reload()
        except ConfigError as error:
            logger.error("the certificates were not changed: %s", error.message)
        else:
            logger.info("the certificates were read again")


def no_certificates() -> Certificates:
    """Returns the certificates of a server without TLS."""
    return Certificates(TlsConfig())


def _server_context(config: TlsConfig) -> ssl.SSLContext | None:
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols([HTTP])
    _load_chain(context, "--ssl-certfile", key_flag="--ssl-keyfile", files=(config.ssl_certfile, config.ssl_keyfile))
    if config.ssl_ca_certs is not None:
        # Not CERT_REQUIRED: health probes have no certificates.
        context.verify_mode = ssl.CERT_OPTIONAL
        _load_trusted(context, "--ssl-ca-certs", file=config.ssl_ca_certs)
    return context


def _client_context(config: TlsConfig) -> ssl.SSLContext | None:
    if config.worker_ca_file is None and config.worker_cert_file is None and config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols([HTTP])
    if config.worker_ca_file is None:
        context.load_default_certs()
    _load_client_files(context, config)
    return context


def _load_client_files(context: ssl.SSLContext, config: TlsConfig) -> None:
    if config.worker_ca_file is not None:
        _load_trusted(context, "--worker-ca-file", file=config.worker_ca_file)
    if config.worker_cert_file is not None:
        _load_chain(
            context,
            "--worker-cert-file",
            key_flag="--worker-key-file",
            files=(config.worker_cert_file, config.worker_key_file),
        )
    elif config.ssl_certfile is not None:
        _load_chain(
            context, "--ssl-certfile", key_flag="--ssl-keyfile", files=(config.ssl_certfile, config.ssl_keyfile)
        )


def _load_chain(context: ssl.SSLContext, flag: str, *, key_flag: str, files: tuple[str, str | None]) -> None:
    certificate, key = files
    try:
        context.load_cert_chain(certificate, key, password=NO_PASSWORD)
    except OSError as error:  # includes ssl.SSLError
        named = f"{flag} {certificate}" + (f" with {key_flag} {key}" if key else "")
        raise ConfigError(
            f"{named}: cannot be used: {_reason(error)}. Expected a certificate and its private key without a "
            "password, in PEM format"
        ) from error


def _load_trusted(context: ssl.SSLContext, flag: str, *, file: str) -> None:
    try:
        context.load_verify_locations(file)
    except OSError as error:
        raise ConfigError(f"{flag} {file}: no certificates can be read from it: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "not a PEM file").replace("_", " ").lower()
    return error.strerror or str(error)
