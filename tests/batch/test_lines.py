"""Lines of batch files: parsed, refused and made."""

import json

import pytest

from motet.batch.lines import (
    BATCH_URLS,
    MAX_CUSTOM_ID_CHARS,
    MAX_LINE_BYTES,
    BatchLine,
    LineError,
    duplicate_custom_id,
    error_line,
    is_blank,
    one_line_json,
    parse_line,
    read_result,
    result_line,
)

CHAT, SCORE = BATCH_URLS[0], BATCH_URLS[-1]
VALID: dict[str, object] = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"model": "m", "n": 2}}


def without(name: str) -> bytes:
    return json.dumps({key: value for key, value in VALID.items() if key != name}).encode()


def changed(**fields: object) -> bytes:
    return json.dumps(VALID | fields).encode()


@pytest.mark.parametrize("url", BATCH_URLS)
def test_a_line_has_the_text_of_its_body(url: str) -> None:
    line = f'\ufeff {{"custom_id": "ä", "method": "POST", "url": "{url}", "body": {{"model": "m", "x":  1.50}}}}\r\n'
    assert parse_line(line.encode()) == BatchLine("ä", url, b'{"model": "m", "x":  1.50}', "m")


def test_a_line_without_a_model_has_none() -> None:
    line = parse_line(changed(body={}))
    assert isinstance(line, BatchLine)
    assert line.model is None


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"not json", "invalid_json_line", None),
        (b"", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (b'{"body":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "invalid_json_line", None),
        (b'{"custom_id": "a\x00"}', "invalid_json_line", None),
        (b'{"other": "\xff"}', "invalid_json_line", None),
        (changed() + changed(), "invalid_json_line", None),
        (b" " * (MAX_LINE_BYTES + 1), "line_too_long", None),
        *((without(name), "missing_required_parameter", name) for name in VALID),
        *((changed(**{name: 1}), "invalid_type", name) for name in VALID),
        (changed(custom_id=10**40), "invalid_type", "custom_id"),
        (changed(custom_id="\ud800"), "invalid_json_line", None),
        (changed(custom_id=""), "invalid_value", "custom_id"),
        (changed(custom_id="a" * (MAX_CUSTOM_ID_CHARS + 1)), "invalid_value", "custom_id"),
        (changed(method="GET"), "invalid_method", "method"),
        (changed(url="/v1/embeddings"), "invalid_url", "url"),
        (changed(url=SCORE), "url_mismatch", "url"),
        (changed(body={"stream": True}), "unsupported_value", "body.stream"),
        (changed(body={"stream": 1}), "unsupported_value", "body.stream"),
        (changed(body={"model": 1}), "invalid_type", "body.model"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_line_that_is_no_request_has_a_code(line: bytes, code: str, param: str | None) -> None:
    error = parse_line(line, endpoint=CHAT)
    assert isinstance(error, LineError)
    assert (error.code, error.param) == (code, param)
    assert error.message.endswith(".")
    assert len(error.message) < 400


def test_an_error_names_the_line_if_its_id_is_valid() -> None:
    error = parse_line(changed(url="/none"))
    assert isinstance(error, LineError)
    assert error.custom_id == "a"


def test_equal_requests_have_equal_ids() -> None:
    lines = [parse_line(changed()), parse_line(changed()), *(parse_line(changed(**{k: "b"})) for k in ("custom_id",))]
    other_body, other_url = parse_line(changed(body={})), parse_line(changed(url=SCORE))
    ids = [line.id for line in [*lines, other_body, other_url] if isinstance(line, BatchLine)]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 4


@pytest.mark.parametrize(
    ("line", "blank"), [(b"", True), (b" \t\r\n", True), (b"\xef\xbb\xbf\r\n", True), (b"0", False)]
)
def test_a_line_without_text_is_blank(line: bytes, blank: bool) -> None:
    assert is_blank(line) is blank


def test_a_result_is_one_line_with_the_body_of_the_server() -> None:
    line = result_line(
        "batch_req_1", custom_id="ä", status_code=200, request_id="r", body=b'{\r\n "a": [1.50,\n "\\n"]}'
    )
    assert line.count(b"\n") == 1
    assert b'"body":{"a":[1.50,"\\n"]}' in line.replace(b": ", b":").replace(b", ", b",")
    response = {"status_code": 200, "request_id": "r", "body": {"a": [1.5, "\n"]}}
    assert json.loads(line) == {"id": "batch_req_1", "custom_id": "ä", "response": response, "error": None}
    result = read_result(line)
    assert result is not None
    assert (result.id, result.custom_id) == ("batch_req_1", "ä")


@pytest.mark.parametrize("body", [b"<html>\n</html>", b"\xff", b"", b"{", b"NaN"])
def test_a_body_that_is_not_json_becomes_a_string(body: bytes) -> None:
    assert json.loads(one_line_json(body)) == body.decode(errors="replace")


def test_an_error_line_has_no_response() -> None:
    line = json.loads(error_line(duplicate_custom_id("a"), number=7))
    assert line["response"] is None
    assert (line["custom_id"], line["error"]["code"], line["error"]["line"]) == ("a", "duplicate_custom_id", 7)
    assert "param" not in json.loads(error_line(LineError("server_lost", "No answer."), number=1))["error"]


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'{"id": "a"}', b'{"custom_id": "a"}', b"\xff", b"[" * 99_999])
def test_other_lines_are_not_results(line: bytes) -> None:
    assert read_result(line) is None
