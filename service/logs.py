"""The log of a process: every line has one shape, whoever writes it. Lines go to stderr, as text or as JSON.

Everything logs by the standard `logging`. A line has more fields by `extra={FIELDS: {...}}`.
"""

from __future__ import annotations

import logging
from typing import Literal

from structlog.contextvars import merge_contextvars
from structlog.dev import ConsoleRenderer, plain_traceback
from structlog.processors import JSONRenderer, TimeStamper, format_exc_info
from structlog.stdlib import ProcessorFormatter, add_log_level, add_logger_name
from structlog.typing import EventDict, Processor, WrappedLogger

FIELDS = "fields"
"""Attribute of a record: its fields by name. A traceback is in `exception`."""


def formatter(form: Literal["text", "json"]) -> ProcessorFormatter:
    """What makes a line of a record. Tracebacks are without the values of variables, which may be texts."""
    render: list[Processor] = [format_exc_info, JSONRenderer()]
    if form == "text":
        render = [
            ConsoleRenderer(
                colors=False,
                pad_event_to=0,
                pad_level=False,
                sort_keys=False,
                repr_native_str=True,  # in quotes, and nothing that a terminal would act on
                exception_formatter=plain_traceback,
            )
        ]
    return ProcessorFormatter(
        foreign_pre_chain=[
            TimeStamper("iso", utc=True),
            add_log_level,
            add_logger_name,
            merge_contextvars,
            _add_fields,
        ],
        processors=[ProcessorFormatter.remove_processors_meta, *render],
    )


def set_up(form: Literal["text", "json"], level: Literal["debug", "info", "warning", "error"]) -> None:
    """Write the log of this process to stderr, with Python's warnings, from this level on."""
    handler = logging.StreamHandler()
    handler.setFormatter(formatter(form))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    # It logs every tick, and every tick that found the last one still at work.
    logging.getLogger("apscheduler").setLevel(logging.ERROR)
    # A line for every migration of a database.
    logging.getLogger("alembic").setLevel(logging.WARNING)


def _add_fields(logger: WrappedLogger, name: str, event: EventDict) -> EventDict:
    event.update(getattr(event["_record"], FIELDS, {}))
    return event
