"""The shape of the log's lines."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from typing import Any, Literal

import pytest

from service.logs import FIELDS, formatter
from tests.support.log_lines import logged

ODD = {"name": "a\nb zoë", "id": "a\x1b[31m\u2028b", "adapters": [0, 3], "seconds": 0.25, "status": None}


def test_fields_of_a_line_are_json_s_own() -> None:
    with logged("json") as lines:
        logging.getLogger("service.some.room").warning("%d of %s", 2, "a\nb", extra={FIELDS: ODD})
    (line,) = lines.objects
    assert line.pop("timestamp").endswith("Z")
    assert line == {"event": "2 of a\nb", "level": "warning", "logger": "service.some.room", **ODD}
    assert lines.text.count("\n") == 1


def test_text_quotes_values_so_that_none_looks_like_a_line_or_moves_a_terminal() -> None:
    with logged("text") as lines:
        logging.getLogger("service.some.room").warning("2 of 3", extra={FIELDS: ODD})
    assert lines.text.count("\n") == 1 and "\x1b" not in lines.text and "\u2028" not in lines.text
    line = lines.text.partition(" ")[2]
    assert line == (
        "[warning] 2 of 3 [service.some.room] name='a\\nb zoë' id='a\\x1b[31m\\u2028b' adapters=[0, 3] "
        "seconds=0.25 status=None\n"
    )


@pytest.mark.parametrize("form", ["text", "json"])
def test_tracebacks_are_without_the_values_of_variables(form: Literal["text", "json"]) -> None:
    canary = "".join(["xyzzy", "-", "canary"])
    with logged(form) as lines:
        try:
            assert canary and {}["missing"]
        except KeyError:
            logging.getLogger("service.some.room").exception("failed")
    assert "Traceback" in lines.text and "KeyError: 'missing'" in lines.text
    assert canary not in lines.text
    if form == "json":
        (line,) = lines.objects
        assert line["event"] == "failed" and line["exception"].startswith("Traceback")


def test_a_handler_of_another_kind_does_not_change_a_line() -> None:
    record = logging.LogRecord("a", logging.INFO, __file__, 1, "said %s", ("so",), None)
    other = logging.Formatter("%(asctime)s %(message)s").format(record)
    assert other.endswith(" said so")
    line: dict[str, Any] = json.loads(formatter("json").format(record))
    assert set(line) == {"event", "timestamp", "level", "logger"} and line["event"] == "said so"


PROCESS = """
import logging, warnings
from service.logs import set_up
set_up("json", "info")
logging.getLogger("service").debug("left out")
logging.getLogger("service").info("said")
logging.getLogger("apscheduler.scheduler").warning("left out")
warnings.warn("warned")
"""


def test_a_process_logs_warnings_too_and_no_lower_levels() -> None:
    done = subprocess.run([sys.executable, "-c", PROCESS], capture_output=True, text=True, check=True, timeout=60)
    lines = [json.loads(line) for line in io.StringIO(done.stderr)]
    assert done.stdout == ""
    assert [line["event"] for line in lines[:-1]] == ["said"]
    assert "UserWarning: warned" in lines[-1]["event"] and lines[-1]["level"] == "warning"
