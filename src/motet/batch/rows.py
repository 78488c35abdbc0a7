"""Rows of a table, and short lines of a JSONL file, as requests: prompts without `method`, `url` and `body`.

    messages                 a list of messages       -> /v1/chat/completions
    prompt                   a list of messages       -> /v1/chat/completions
    prompt                   a text, or token ids     -> /v1/completions
    url, body                a complete request; the body is an object or its JSON text

Common fields of the bodies, such as `n` and `max_tokens`, are given once for all rows."""

from collections.abc import Mapping
from typing import Any

import msgspec

from motet.batch.lines import BATCH_URLS, BOM, METHOD, BatchLine, LineError, parse_line
from motet.errors import ConfigError

CHAT, COMPLETIONS = BATCH_URLS[:2]
PROMPT_COLUMNS = ("messages", "prompt", "url", "body")
"""Columns that make a request. Others are ignored."""
BodyFields = Mapping[str, Any]

_OBJECT = msgspec.json.Decoder(dict[str, Any])


def row_request(row: Mapping[str, Any], *, custom_id: str, params: BodyFields) -> BatchLine | LineError:
    """Returns the request of a row, or the reason why it has none. `params`: fields of each body; a row's own body
    takes precedence."""
    try:
        url, body = _request_of(row)
        line = {"custom_id": custom_id, "method": METHOD, "url": url, "body": {**params, **without_nulls(body)}}
        return parse_line(msgspec.json.encode(line))
    except (ValueError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        return LineError("invalid_row", f"This row is not a request: {error}.", None, custom_id)


def short_line(line: bytes, *, number: int, params: BodyFields) -> BatchLine | LineError | None:
    """Returns the request of a line that has only a prompt or messages, and possibly `custom_id`, which is otherwise
    made of the line's number; None for any other line."""
    try:
        row = _OBJECT.decode(line.removeprefix(BOM))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not row.keys() & {"messages", "prompt"} or row.keys() & {"method", "url", "body"}:
        return None
    custom_id = row.get("custom_id", f"line-{number}")
    if not isinstance(custom_id, str):
        return LineError("invalid_type", "custom_id must be a valid string.", "custom_id")
    return row_request(row, custom_id=custom_id, params=params)


def _request_of(row: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns URL and body. Raises ValueError if the row has neither."""
    if (body := row.get("body")) is not None:
        if isinstance(body, str):
            body = _OBJECT.decode(body)
        if not isinstance(body, Mapping):
            raise ValueError("body must be an object, or its JSON text")
        return str(row.get("url") or CHAT), body
    if (messages := row.get("messages")) is not None:
        return CHAT, {"messages": messages}
    if (prompt := row.get("prompt")) is not None:
        is_chat = isinstance(prompt, list) and all(isinstance(part, Mapping) for part in prompt)
        return (CHAT, {"messages": prompt}) if is_chat else (COMPLETIONS, {"prompt": prompt})
    raise ValueError("it has no messages, prompt or body")


def without_nulls(value: Any) -> Any:
    """Returns a value without the members of objects that are null: a table has all fields of its structs in each row,
    also those that a message does not have."""
    if isinstance(value, Mapping):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value


def params_of(text: str) -> BodyFields:
    """Returns the value of `--params`. Raises ConfigError unless it is a JSON object."""
    try:
        return _OBJECT.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f'--params must be a JSON object, such as {{"n": 4}}: {error}') from error
