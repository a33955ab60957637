"""`status`: an overview of a running server."""

from __future__ import annotations

import re
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any

import typer

from service.cli.console import table, write_json
from service.cli.operate import ask, call, practice_text
from service.cli.options import LOCAL, Config, Json, Url, adapter_name, settings_from
from service.core import RedraftError, RunState, Unavailable

RUNS = 20
"""Number of newest runs searched for verdicts."""
VERDICTS = 3
SAMPLE = re.compile(r'^redraft:(\w+)\{model_name="(?:[^"\\]|\\.)*"\} (\S+)', re.MULTILINE)


def status(url: Url = LOCAL, config: Config = None, json: Json = None) -> None:
    """Show a running server's state: readiness, requests, draft statistics, training.

    A server without API keys shows its requests only to the user who runs it: pass the server's --config if it sets
    another home folder. Exits with 0 if the server is ready, with 1 if it is not or does not answer.
    """
    found = _read(url, settings_from(config).home)
    _show(url, found)
    write_json(json, {"url": url} | found)
    if not found["ready"]:
        raise typer.Exit(1)


def _read(url: str, home: Path) -> dict[str, Any]:
    """The server's state; None for parts it does not report. Raises Unavailable if it does not answer."""
    ready, reason = _ask(url, "/health/ready")
    models, _ = _ask(url, "/v1/models")
    adapters, _ = _ask(url, "/adapters")
    requests, _ = _ask(url, "/requests", home)
    practice, _ = _ask(url, "/practice")
    gains, _ = _ask(url, "/gains")
    learning, _ = _ask(url, "/learning")
    runs, _ = _ask(url, f"/runs?limit={RUNS}")
    found = [] if runs is None else runs["runs"]
    counted = _counters(call(url, "GET", "/metrics").text)
    drafted, calls = counted.get("spec_decode_num_draft_tokens_total"), counted.get("rounds_total")
    return {
        "ready": ready is not None,
        "reason": reason,
        "model": None if models is None else models["data"][0]["id"],
        "adapter": None if adapters is None else adapters["active"],
        "requests": None if requests is None else _states(requests["requests"]),
        "acceptance_rate": counted["spec_decode_num_accepted_tokens_total"] / drafted if drafted else None,
        "tokens_per_call": counted["generation_tokens_total"] / calls if calls else None,
        "gains": gains,
        "learning": learning,
        "practice": practice,
        "run": next((run for run in found if not RunState(run["state"]).over), None),
        "without_verdict": list(takewhile(lambda run: run["verdict"] is None, dropwhile(_under_way, found))),
        "verdicts": [run for run in found if run["verdict"] is not None][:VERDICTS],
    }


def _ask(url: str, path: str, home: Path | None = None) -> tuple[dict[str, Any] | None, str | None]:
    """A JSON object from the server, or the reason why there is none. Raises Unavailable if it does not answer."""
    try:
        return ask(url, "GET", path, home=home), None
    except Unavailable:
        raise
    except RedraftError as error:
        return None, str(error)


def _states(requests: list[dict[str, Any]]) -> dict[str, int]:
    """Number of requests by state; those in prefill count as running."""
    waiting = sum(request["state"] == "waiting" for request in requests)
    return {"running": len(requests) - waiting, "waiting": waiting}


def _counters(metrics: str) -> dict[str, float]:
    """The metrics with no label except the model's name, by name without the prefix."""
    return {name: float(value) for name, value in SAMPLE.findall(metrics)}


def _show(url: str, found: dict[str, Any]) -> None:
    requests, run, practice = found["requests"], found["run"], found["practice"]
    adapter, rate, tokens = found["adapter"], found["acceptance_rate"], found["tokens_per_call"]
    rows: list[tuple[str, object]] = [
        ("ready", "yes" if found["ready"] else f"no: {found['reason']}"),
        ("model", found["model"] or ""),
        ("adapter", "" if adapter is None else adapter_name(adapter)),
        *([] if found["gains"] is None else [("your draft", _gains(found["gains"]))]),
        ("requests", "" if requests is None else f"{requests['running']} running, {requests['waiting']} waiting"),
        ("acceptance rate", "" if rate is None else f"{rate:.3f} of the drafted tokens, since the start"),
        ("tokens per target call", "" if tokens is None else f"{tokens:.2f}, since the start"),
        ("training run", "none under way" if run is None else _progress(run)),
        *([("last run", _without_verdict(found["without_verdict"]))] if found["without_verdict"] else []),
        *([] if found["learning"] is None else _learning_rows(found["learning"])),
        ("practice by itself", "" if practice is None else practice_text(practice)),
        *(
            (f"verdict of run {each['id']}", f"{each['state']}: {each['verdict']['reason']}")
            for each in found["verdicts"]
        ),
    ]
    table(f"redraft at {url}", ("what", "now"), rows)


def _learning_rows(learning: dict[str, Any]) -> list[tuple[str, object]]:
    """When the next run starts, what its gate requires, and the active adapter's largest loss."""
    used = f"{learning['minutes']:.0f} of {learning['minutes_per_day']:g} minutes in 24 hours"
    wait = f"; {learning['refused']} refused since the last promotion" if learning["refused"] else ""
    texts = f"{learning['held_out']} of {learning['held_out_needed']} held-out prompts"
    base = learning["against_base"]
    worst = min(base, key=lambda name: base[name][1], default=None)
    return [
        ("next run", f"{learning['waits'] or 'nothing is against it'} ({used}{wait})"),
        (
            "next gate",
            f"tests at {learning['level']:.2g} ({learning['level_after_promotion']:.2g} after a promotion), on {texts}",
        ),
        *([] if worst is None else [("against the base draft", f"at worst {_gain(base[worst])} on {worst}")]),
    ]


def _gain(gain: list[float]) -> str:
    return f"{gain[0]:+.1%} ({gain[1]:+.1%} to {gain[2]:+.1%})"


def _gains(gains: dict[str, Any]) -> str:
    """The serving adapter's gain, or why there is none yet."""
    measured = gains["measured"]
    return f"nothing gained yet: {gains['reason']}" if measured is None else measured["summary"]


def _under_way(run: dict[str, Any]) -> bool:
    return not RunState(run["state"]).over


def _without_verdict(runs: list[dict[str, Any]]) -> str:
    """The end of the last run, and the number of consecutive runs without a verdict. runs: these, newest first."""
    run = runs[0]
    reason = run["error"] or "no reason is known"
    text = f"run {run['id']}: {RunState(run['state']).words}: {reason}; its texts were given back"
    return text if len(runs) == 1 else f"{text}; {len(runs)} consecutive runs without a verdict"


def _progress(run: dict[str, Any]) -> str:
    done = run["progress"]
    paused = f", paused: {done['paused']}" if done["paused"] else ""
    state = "writing practice text" if done["writing"] else run["state"]
    return f"run {run['id']}: {state}, step {done['step']} of {done['steps']}{paused}"
