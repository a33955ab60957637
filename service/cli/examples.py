"""Examples for every command, shown at the end of its `--help`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import typer

EXAMPLES: Mapping[str, Sequence[str]] = {
    "serve": (
        "redraft serve",
        "redraft serve mlx-community/Some-Model-4bit --draft some-draft",
        "redraft serve some-model --alias gpt-4o --max-context 16384",
        "redraft serve --config server.toml --port 9000 --no-train",
    ),
    "trainer": ("redraft trainer --config server.toml",),
    "status": ("redraft status", "redraft status --url http://127.0.0.1:9000 --json -"),
    "demo": ("redraft demo", "redraft demo --full --png result.png"),
    "doctor": ("redraft doctor", "redraft doctor some-model --speed"),
    "models list": ("redraft models list", "redraft models list --json -"),
    "models get": ("redraft models get smollm2-135m",),
    "models remove": ("redraft models remove mlx-community/Some-Model-4bit --yes",),
    "make-draft": (
        "redraft make-draft --target some-model --out some-draft",
        "redraft make-draft --target some-model --out some-head --kind eagle",
    ),
    "generate": (
        'redraft generate "Name three uses of a paper clip."',
        "redraft generate hello --temperature 0.8 --seed 1",
    ),
    "chat": ("redraft chat", "redraft chat some-model --draft none"),
    "train": ("redraft train", "redraft train --no-wait --url http://127.0.0.1:9000"),
    "practice": ("redraft practice", "redraft practice --minutes 5 --no-wait", "redraft practice --on"),
    "eval agreement": ("redraft eval agreement --prompts test.jsonl --adapter 3 --json -",),
    "eval cycle": ("redraft eval cycle --train a.jsonl --train-limit 500 --test b.jsonl",),
    "eval stream": ("redraft eval stream sql.jsonl:500 maths.jsonl:500",),
    "eval score": ("redraft eval score", "redraft eval score --adapter bare --adapter 3 --k 2,4"),
    "eval gate": ("redraft eval gate --train a.jsonl --test b.jsonl --keep adapters",),
    "eval poison": ("redraft eval poison --honest a.jsonl --test b.jsonl",),
    "bench decode": ("redraft bench decode --prompts test.jsonl --limit 20",),
    "bench serve": ("redraft bench serve --prompts test.jsonl --clients 1,4,16",),
    "bench train": ("redraft bench train --steps 8",),
    "bench swap": ("redraft bench swap --clients 8",),
    "bench store": ("redraft bench store --cases 100000",),
    "bench round": ("redraft bench round --rows 1,4 --modes plain,drafted",),
    "cases list": (
        "redraft cases list --limit 50 --text",
        "redraft cases list --url http://127.0.0.1:9000",
        "redraft cases list --json -",
    ),
    "cases show": ("redraft cases show 17", "redraft cases show 17 --json -"),
    "cases stats": ("redraft cases stats", "redraft cases stats --json -"),
    "cases quarantined": ("redraft cases quarantined",),
    "cases release": ("redraft cases release", "redraft cases release --run 7"),
    "adapters list": (
        "redraft adapters list",
        "redraft adapters list --url http://127.0.0.1:9000",
        "redraft adapters list --json -",
    ),
    "adapters activate": ("redraft adapters activate 3", "redraft adapters activate bare"),
    "adapters remove": ("redraft adapters remove 3", "redraft adapters remove 3 --yes"),
    "adapters rollback": ("redraft adapters rollback", "redraft adapters rollback --expected 3"),
    "adapters export": ("redraft adapters export 3 folder", "redraft adapters export 3 folder --fuse"),
    "adapters push": ("redraft adapters push ORG/NAME --adapter 3 --base-model ORG/DRAFT",),
    "runs list": (
        "redraft runs list",
        "redraft runs list --url http://127.0.0.1:9000",
        "redraft runs list --limit 5 --json -",
    ),
    "runs show": ("redraft runs show 7", "redraft runs show 7 --json -"),
    "config show": (
        "redraft config show",
        "redraft config show engine store.url --config server.toml",
        "redraft config show server.port --port 9000 --json -",
    ),
    "keys create": ("redraft keys create ada", "redraft keys create me --role operator"),
    "keys list": ("redraft keys list", "redraft keys list --json -"),
    "keys revoke": ("redraft keys revoke ada", "redraft keys revoke ada --yes"),
    "data export": ("redraft data export --client ada --out ada.jsonl", "redraft data export --everything --out -"),
    "data erase": ("redraft data erase --client ada", "redraft data erase --keep 10000 --yes"),
    "db upgrade": ("redraft db upgrade", "redraft db upgrade --config server.toml"),
}
"""By command."""


def add_examples(app: typer.Typer, group: str = "") -> None:
    """Appends the examples to the help of every command of `app`."""
    for command in app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__.strip("_")
        if (examples := EXAMPLES.get(f"{group} {name}".strip())) is not None:
            command.epilog = "\n\n".join(("Examples:", *examples))
    for below in app.registered_groups:
        assert below.typer_instance is not None
        add_examples(below.typer_instance, below.name or "")
