"""Log lines, for people and for machines."""

import io
import json
import logging
import subprocess
import sys

import pytest

from motet.log import ONCE_A_MINUTE, LogFormat, failure, notice, setup_logging


def logged(format: LogFormat) -> str:
    stream = io.StringIO()
    setup_logging(format=format, stream=stream)
    logging.getLogger("motet.api").info("group ended", extra={"fields": {"request_id": "r-1", "n": 8}})
    return stream.getvalue()


def test_text_line_ends_with_its_figures() -> None:
    assert logged(LogFormat.TEXT).endswith(" INFO motet.api: group ended request_id=r-1 n=8\n")


def test_json_line_is_one_object_with_its_figures() -> None:
    line = json.loads(logged(LogFormat.JSON))
    assert (line["message"], line["level"], line["logger"]) == ("group ended", "info", "motet.api")
    assert (line["request_id"], line["n"]) == ("r-1", 8)
    assert line["time"].endswith("+00:00")


def test_json_line_holds_the_exception() -> None:
    stream = io.StringIO()
    setup_logging(format=LogFormat.JSON, stream=stream)
    try:
        raise ValueError("odd")
    except ValueError:
        logging.getLogger("motet.api").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: odd" in json.loads(line)["exception"]


def test_text_of_others_stays_in_its_figure_of_one_short_line() -> None:
    hostile = 'a"\nINFO motet.api: group ended status=200 \x1b[2J\x9b\u202e\ud800' + "x" * 10_000
    for format in LogFormat:
        stream = io.StringIO()
        setup_logging(format=format, stream=stream)
        logging.getLogger("motet.api").info("refused", extra={"fields": {"param": hostile, "status": 400}})
        (line,) = stream.getvalue().splitlines()
        assert line.isprintable() and len(line) < 3_000
        if format == LogFormat.JSON:
            assert json.loads(line)["status"] == 400
        else:
            assert line.partition(' param="a\\"\\nINFO ')[2].endswith(f'({len(hostile)} characters)" status=400')


def test_level_is_kept() -> None:
    stream = io.StringIO()
    setup_logging(level="warning", stream=stream)
    logging.getLogger("motet.api").info("quiet")
    assert stream.getvalue() == ""


HOSTILE = "a\nERROR motet: forged\r\x1b[2J\x9b31m\u2028\u202e\ud800 é"
SHOWN = r"a\nERROR motet: forged\r\x1b[2J\x9b31m\u2028\u202e\ud800 é"
QUOTED = '"' + SHOWN.replace(r"\x1b", r"\u001b") + '"'


def hostile(format: LogFormat) -> str:
    stream = io.StringIO()
    setup_logging(format=format, stream=stream)
    try:
        raise ValueError("\x1b[31mred\r")
    except ValueError:
        logging.getLogger("motet.api").exception("said %s", HOSTILE, extra={"fields": {"worker": HOSTILE}})
    written = stream.getvalue()
    assert not any(odd in written for odd in "\r\x1b\x9b\u2028\u202e\ud800")
    return written


def test_nothing_that_is_quoted_ends_a_text_line_or_moves_the_cursor() -> None:
    line, _, exception = hostile(LogFormat.TEXT).partition("\n")
    assert line.endswith(f"said {SHOWN} worker={QUOTED}")
    assert exception.endswith("ValueError: \\x1b[31mred\\r\n")


def test_a_json_line_holds_what_is_quoted_as_escapes() -> None:
    (line,) = hostile(LogFormat.JSON).splitlines()
    parsed = json.loads(line)
    assert parsed["message"] == "said " + HOSTILE.replace("\ud800", r"\ud800")
    assert parsed["worker"] == HOSTILE.replace("\ud800", r"\ud800")


def test_a_line_that_would_be_repeated_is_written_once() -> None:
    stream = io.StringIO()
    setup_logging(stream=stream)
    for _ in range(3):
        logging.getLogger("motet.api").error("no file is left", extra=ONCE_A_MINUTE)
        logging.getLogger("motet.api").error("another line")
    assert (stream.getvalue().count("no file is left"), stream.getvalue().count("another line")) == (1, 3)


def for_people(format: LogFormat, level: str = "info", *, color: bool = False) -> list[str]:
    stream = io.StringIO()
    setup_logging(format=format, level=level, stream=stream, color=color)
    notice("loading the model", size_gb=0.27)
    failure("there is\nno model")
    return stream.getvalue().splitlines()


def test_lines_for_people_have_no_time_and_follow_format_and_level() -> None:
    assert for_people(LogFormat.TEXT) == ["loading the model", "motet: there is", "no model"]
    assert for_people(LogFormat.TEXT, "error") == ["motet: there is", "no model"]
    first, second = map(json.loads, for_people(LogFormat.JSON))
    assert (first["message"], first["level"], first["size_gb"]) == ("loading the model", "info", 0.27)
    assert (second["message"], second["level"]) == ("there is\nno model", "error")
    assert [json.loads(line)["level"] for line in for_people(LogFormat.JSON, "error")] == ["error"]


def test_only_the_failure_is_red_on_a_terminal() -> None:
    assert for_people(LogFormat.TEXT, color=True)[:2] == ["loading the model", "\x1b[31mmotet: there is"]


PROGRAM = """
import logging, warnings
from motet.log import capture_process, setup_logging
setup_logging(format="json"); capture_process(); setup_logging(format="json")
warnings.warn("old")
logging.getLogger("uvicorn.error").error("broken")
raise ValueError("odd")
"""


@pytest.mark.slow
def test_a_process_prints_everything_as_json() -> None:
    """Starts a process, since the hooks stay until the process ends."""
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert [(line["logger"], line["level"]) for line in lines] == [
        ("py.warnings", "warning"),
        ("uvicorn.error", "error"),
        ("motet", "critical"),
    ]
    assert lines[0]["message"] == "UserWarning: old"
    assert "ValueError: odd" in lines[2]["exception"]
