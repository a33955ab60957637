"""A real child process that follows a plan instead of training: `scripted_child.py PLAN`, with the job on stdin.

PLAN is a JSON file: kind of job -> act. A trained adapter is a folder whose file holds the share of calls that it needs and,
optionally, the shortest draft length at which it does (1 by default). Scores are computed from that file.
"""

import json
import os
import signal
import sys
import time
import zlib
from pathlib import Path

# It multiplies nothing: loading the fast BLAS would take most of its time.
os.environ["REDRAFT_BLAS"] = "shipped"
from service.store.artifacts import publish
from service.store.database import Database
from service.store.log.training_texts import TrainingTexts


def send(kind: str, **message: object) -> None:
    print(json.dumps({"type": kind, **message}), flush=True)


def die() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def scores(folder: str | None, names: list[str]) -> list[dict[str, object]]:
    text = "1.0" if folder is None else (Path(folder) / "adapters.safetensors").read_text()
    share, first = (*map(float, text.split()), 1.0)[:2]

    def calls(at_three: float) -> list[float]:
        return [at_three * more * (share if k >= first else 1.0) for k, more in ((1, 1.4), (2, 1.2), (3, 1.0))]

    drafted = {"rounds": 10, "accepted": 20, "predicted": 20.0}
    return [
        {"generation": name, "domain": "a", "tokens": 40, "agreed": 20, "calls": calls(20 + i % 3), **drafted}
        for i, name in enumerate(names)
    ]


def reads(job: dict[str, object], name: str) -> bool:
    """Whether a run learns from this text."""
    database = Database(str(job["url"]), read_only=True)
    texts, run = TrainingTexts(database), int(str(job["run"]))
    read = [*texts.claimed(run), *texts.claimed_again(run)]
    if not job.get("own_texts_only"):
        read += texts.window(read[0].provenance, run, 100)
        send("texts", window=[one.id for one in read], replay=[])
    database.close()
    return name in {one.id for one in read}


def train(job: dict[str, object], act: str) -> None:
    """An act that begins with "name" says first what else is learnt from, as a real child does: "name A B: hang"."""
    if act.startswith("name "):
        names, act = act.removeprefix("name ").split(": ")
        send("texts", window=names.split(), replay=[])
    send("progress", step=1, steps=2, loss=1.5, grad_norm=0.5, tokens_per_second=100.0, seconds_left=1.0)
    match act:
        case "kill":
            die()
        case "garbage":
            print("Traceback? { not json", flush=True)
            sys.stdin.read()
            sys.exit(75)
        case "hang":
            sys.stdin.read()
            sys.exit(75)
        case "memory ran out":
            return send("failed", reason="memory ran out", memory=True)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "ended by a signal":
            os.kill(os.getpid(), signal.SIGTERM)
        case _ if act.startswith("crash on "):
            if reads(job, act.removeprefix("crash on ")):
                die()
        case "ignore the pipe":
            time.sleep(60)
        case "give up":
            return send("failed", reason="too few examples")
        case "leave":
            sys.exit(0)
        case _ if act.startswith("learn "):
            send("texts", window=act.split()[1:2], replay=act.split()[2:])
        case _:
            pass
    out = Path(str(job["out"]))
    scratch, final = out / f".run-{job['run']}.part", out / f"run-{job['run']}-{job['fencing']}"
    scratch.mkdir(parents=True)
    # "better": by a fifth than whatever it starts from.
    share = {"lose": 1.05, "broken": 0.6, "better": 0.8 ** int(str(job["run"])), "long": "0.8 3"}.get(act, 0.8)
    (scratch / "adapters.safetensors").write_text(str(share))
    if act == "kill before publishing":
        die()
    sha256 = publish(scratch, final)
    if act == "kill after publishing":
        die()
    send("progress", step=2, steps=2, loss=1.0, grad_norm=float("nan"), tokens_per_second=100.0, seconds_left=0.0)
    send("candidate", folder=str(final), sha256=sha256, rank=4, scale=2.0, keys=["self_attn.q_proj"], trainable=1)
    if act == "kill after the candidate":
        die()
    if act == "hang after the candidate":
        sys.stdin.read()
        sys.exit(75)
    if act == "broken":
        (final / "adapters.safetensors").write_text("0.7")
    names = [f"held-out-{i}" for i in range(16)]
    parent: str | None = job["parent"]  # pyright: ignore[reportAssignmentType]
    found = {"candidate": scores(str(final), names), "0": scores(None, names)}
    found[str(job["parent_id"])] = scores(parent, names)
    if act == "other texts":
        found["candidate"] = found["candidate"][1:]
    if act == "no parent":
        del found[str(job["parent_id"])]
    golden = {name: scores(None, names) for name in found}
    if act == "golden":
        for item in golden["candidate"]:
            item["calls"] = [1.1 * calls for calls in item["calls"]]  # pyright: ignore
    # "slow steps": each of its draft steps takes twice the time.
    steps = {name: 2.0 if act == "slow steps" and name == "candidate" else 1.0 for name in found}
    send("scores", scores=found, golden=golden if act in {"golden", "fair golden"} else {}, steps=steps)
    send("done")


def score(job: dict[str, object], act: str) -> None:
    if act == "kill":
        die()
    if act == "hang":
        sys.stdin.read()
        sys.exit(75)
    adapters: dict[str, str | None] = job["adapters"]  # pyright: ignore[reportAssignmentType]
    names: list[str] = job["generations"]  # pyright: ignore[reportAssignmentType]
    found = {name: scores(folder, names) for name, folder in adapters.items()}
    if act.startswith("health"):
        for item in (one for each in found.values() for one in each):
            item["conversation"] = "health" if str(item["generation"]).startswith("health") else ""
        # The bare draft's calls times what the newest adapter needs of them on health checks, and on all else by and large.
        checks, others = map(float, act.split()[1:])
        for item, bare in zip(found[max(adapters, key=int)], found["0"], strict=True):
            name = str(item["generation"])
            noise = zlib.crc32(name.encode()) % 201 / 1000 - 0.1
            share = checks if name.startswith("health") else others + noise
            item["calls"] = [share * calls for calls in bare["calls"]]  # pyright: ignore
    if act == "worse":
        newest = max(adapters, key=int)
        for item in found[newest]:
            item["calls"] = [2 * calls for calls in item["calls"]]  # pyright: ignore
    if act == "short":
        # Less is accepted than its scores say.
        for item in found[max(adapters, key=int)]:
            item["predicted"] = 24.0
    steps = {name: 2.0 if act == "slow steps" and name == max(adapters, key=int) else 1.0 for name in adapters}
    send("scores", scores=found, steps=steps)
    send("done")


def main() -> None:
    job = json.loads(sys.stdin.readline())
    plan = json.loads(Path(sys.argv[1]).read_text())
    if job["kind"] == "train":
        train(job, plan["train"])
    else:
        score(job, plan["score"])


if __name__ == "__main__":
    main()
