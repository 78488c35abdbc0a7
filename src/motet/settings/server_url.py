"""The URL of a server: checked, and in the form to which routes are appended."""

from urllib.parse import urlsplit

from motet.errors import ConfigError


def server_url(text: str, *, shown: str = "") -> str:
    """Returns the URL of a server without `/v1` and slashes at its end. Raises ConfigError if the text is not a URL.

    `shown`: the text with its setting, for the error."""
    if not is_http_url(text):
        raise ConfigError(f"{shown or repr(text)} is not a URL such as http://host:8000")
    return without_v1(text)


def url_of_flag(text: str) -> str:
    """Returns the URL of a `--url`, which can lack `http://`. Raises ConfigError."""
    return server_url(text if "://" in text else f"http://{text}", shown=f"--url {text!r}")


def without_v1(url: str) -> str:
    """Returns a URL without `/v1` and slashes at its end."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def is_http_url(url: str) -> bool:
    """Returns True for an http or https URL with a valid host and, if it has a port, a valid port."""
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").encode("idna")
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(host) and port != 0 and url.isprintable() and " " not in url
