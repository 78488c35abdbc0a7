"""The URLs of servers that programs and users name."""

import pytest

from motet.errors import ConfigError
from motet.settings.server_url import server_url, url_of_flag


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://host", "http://host"),
        ("https://host:1/", "https://host:1"),
        ("http://host/v1", "http://host"),
        ("http://host/path/v1//", "http://host/path"),
        ("http://[::1]:80", "http://[::1]:80"),
        ("http://a_service.namespace", "http://a_service.namespace"),
    ],
)
def test_a_url_has_no_v1_and_no_slash_at_its_end(text: str, url: str) -> None:
    assert server_url(text) == url_of_flag(text) == url
    assert url_of_flag(text.removeprefix("http://")) == url


@pytest.mark.parametrize(
    "text",
    [
        *("", "host", "host:80", "ftp://host", "http://", "http://:80", "http://h:0", "http://h:x", "http://h:99999"),
        *("http://[::1", "http://a b", "http://a\n", "http://a..b", "http://" + "a" * 70, "http://\u200b"),
    ],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a URL such as http://host:8000"):
        server_url(text)
