"""What `serve` asks at a terminal once it listens: whether the target may practice by itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

from service.cli.console import agrees, at_terminal, fail, out
from service.core import RedraftError
from service.settings import Settings


def tolerate_background() -> None:
    """Let a process that is moved to the background while the question is open go on: reading fails then, where it would stop
    the whole server. On the main thread."""
    signal.signal(signal.SIGTTIN, signal.SIG_IGN)


def ask_aside(settings: Settings, choose: Callable[[bool], object]) -> None:
    """Ask on a thread of its own, which ends with the process: requests are served meanwhile."""
    if at_terminal() and is_open(settings):
        threading.Thread(
            target=ask_about_practice, args=(settings, choose), name="redraft-question", daemon=True
        ).start()


def is_open(settings: Settings) -> bool:
    """Whether practice is possible, and neither the configuration nor an earlier answer says whether it starts by itself."""
    from service.cli.models import may_have_draft
    from service.lifecycle.practice_choice import PracticeChoice

    training = settings.training
    trains = training.enabled and training.run_here and settings.engine.num_draft_tokens > 0
    return PracticeChoice(training, settings.home).open and trains and may_have_draft(settings)


def ask_about_practice(settings: Settings, choose: Callable[[bool], object]) -> None:
    """Ask, and hand over the answer; without one nothing is chosen. choose: as core.Operator.choose_practice."""
    training = settings.training
    where = ", never on battery" if training.pause_on_battery else ""
    out.print(
        "While nothing is asked, the target can write text like what was logged, from which its draft learns: it uses the idle "
        f"machine for {training.practice_minutes_per_day:g} minutes a day at most{where}, and writes "
        f"{training.practice_gb:g} GB at most in {settings.home}.\n"
        "To change the answer later: the page, `redraft practice --on` or `--off`, or training.practice.",
        highlight=False,
    )
    if (may := agrees("May it practice?")) is None:
        return
    try:
        choose(may)
    except RedraftError as error:
        fail(str(error))
