"""The question that `serve` asks at a terminal after start-up: whether the target may practice automatically."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from service.cli.console import agrees, at_terminal, fail, out
from service.core import RedraftError
from service.settings import Settings


def tolerate_background() -> None:
    """Lets a process continue that is moved to the background while the question is open: reading then fails instead of
    stopping the whole server. On the main thread."""
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)


def ask_aside(settings: Settings, choose: Callable[[bool], object]) -> None:
    """Asks on a separate daemon thread, so that requests are served in the meantime."""
    if at_terminal() and is_open(settings):
        threading.Thread(
            target=ask_about_practice, args=(settings, choose), name="redraft-question", daemon=True
        ).start()


def is_open(settings: Settings) -> bool:
    """Whether practice is possible, and neither the configuration nor an earlier answer has decided about it."""
    from service.cli.models import may_have_draft
    from service.lifecycle.practice_choice import PracticeChoice

    training = settings.training
    trains = training.enabled and training.run_here and settings.engine.num_draft_tokens > 0
    return PracticeChoice(training, settings.home).open and trains and may_have_draft(settings)


def ask_about_practice(settings: Settings, choose: Callable[[bool], object]) -> None:
    """Asks, and passes on the answer; without one nothing is chosen. choose: as core.Operator.choose_practice."""
    training = settings.training
    where = ", never on battery" if training.pause_on_battery else ""
    out.print(
        "While the server is idle, the target can write text similar to logged traffic, which its draft learns from. "
        f"This uses the machine for at most {training.practice_minutes_per_day:g} minutes a day{where}, and at most "
        f"{training.practice_gb:g} GB in {settings.home}.\n"
        "To change the answer later: the page, `redraft practice --on` or `--off`, or training.practice.",
        highlight=False,
    )
    if (may := agrees("May it practice?")) is None:
        return
    try:
        choose(may)
    except RedraftError as error:
        fail(str(error))
