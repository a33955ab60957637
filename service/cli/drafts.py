"""`make-draft`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from service.cli.console import err, out, progress, write_json
from service.cli.names import check_model
from service.cli.options import Config, Json, settings_from


def make_draft(
    target: Annotated[
        str,
        typer.Option(
            "--target", "--model", "-m", help="The model to make a draft for: catalogue name, hub name, or folder."
        ),
    ],
    out_folder: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="Folder to write the draft to; by default in the home folder, where `redraft serve` finds it for this target.",
        ),
    ] = None,
    kind: Annotated[
        str, typer.Option(help="layers: some of the target's; eagle: one layer that reads the target's hidden states.")
    ] = "layers",
    layers: Annotated[
        str | None,
        typer.Option(
            help="Indices of the target's layers to keep or, for eagle, to read; negative ones count from the end. Default: "
            "0,1,-2,-1 or, for eagle, the second, the middle and the fourth from last."
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of training text the target writes.")] = 2_000_000,
    length: Annotated[int, typer.Option(min=32, help="Tokens of one text.")] = 384,
    rows: Annotated[int, typer.Option(min=1, help="Texts written at a time.")] = 64,
    epochs: Annotated[int, typer.Option(min=1)] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Texts in one training step.")] = 64,
    learning_rate: Annotated[float, typer.Option(min=0.0)] = 1e-3,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    dtype: Annotated[str, typer.Option(help="Precision of writing and training: float32 or bfloat16.")] = "float32",
    held_out: Annotated[int, typer.Option(min=1, help="Greedy texts held out for measuring.")] = 64,
    vocabulary: Annotated[
        int, typer.Option(min=0, help="Tokens the draft may propose, the most frequent ones; 0: all.")
    ] = 8192,
    general: Annotated[int, typer.Option(min=0, help="Greedy exchanges written for the replay set.")] = 0,
    start: Annotated[str | None, typer.Option(help="Continue from this draft: catalogue name or folder.")] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="Save the text in this .npz file, or reuse the file; or a folder of practice text in the home folder."
        ),
    ] = None,
    greedy: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of texts whose answers are greedy.")] = 0.25,
    openings: Annotated[
        Path | None, typer.Option(help="File with openings of user turns, one per line; an empty line: no opening.")
    ] = None,
    turn: Annotated[int | None, typer.Option(min=1, help="Maximum tokens of a turn.")] = None,
    blend: Annotated[
        bool,
        typer.Option("--blend", help="Train on KL and total variation together, for a draft that is already good."),
    ] = False,
    package: Annotated[
        Path | None,
        typer.Option(
            help="Also write the draft's own weights and the replay set separately, as shipped with a package."
        ),
    ] = None,
    config: Config = None,
    json: Json = None,
) -> None:
    """Make a draft for any target, from some of its layers or as an EAGLE head, trained on text that the target writes.

    Under mlx.launch, the processes share the work.
    """
    from service.learning.make import draft
    from service.learning.ranks import Ranks
    from service.models.catalog import DRAFTS, resolve
    from service.models.draft_choice import own_name
    from service.store.permissions import private_folder

    if kind not in draft.KINDS:
        raise typer.BadParameter(" or ".join(draft.KINDS), param_hint="--kind")
    if dtype not in {"float32", "bfloat16"}:
        raise typer.BadParameter("float32 or bfloat16", param_hint="--dtype")
    try:
        named = tuple(int(part) for part in layers.split(",")) if layers is not None else None
    except ValueError:
        raise typer.BadParameter("indices separated by commas, such as 0,1,-2,-1", param_hint="--layers") from None
    settings = settings_from(config)
    revision = settings.models.revision if target == settings.models.target else None
    check_model(target, settings.home, revision)
    folder = resolve(target, settings.home, revision=revision)
    if out_folder is None:
        private_folder(settings.home / DRAFTS)
        out_folder = settings.home / DRAFTS / f"{own_name(target)}-{'eagle' if kind == 'eagle' else 'draft'}"
    recipe = draft.Recipe(
        layers=named,
        kind=kind,
        tokens=tokens,
        length=length,
        rows=rows,
        epochs=epochs,
        batch=batch,
        learning_rate=learning_rate,
        seed=seed,
        held_out=held_out,
        general=general,
        vocabulary=vocabulary,
        dtype=dtype,
        greedy=greedy,
        openings=tuple(openings.read_text(encoding="utf-8").splitlines()) if openings else (),
        turn=turn,
        blend=blend,
    )
    if general and package is None:
        raise typer.BadParameter("the replay set is written with --package", param_hint="--general")
    ranks = Ranks.join()
    with progress("making the draft") as bar:

        def report(stage: str, done: int, of: int, note: str) -> None:
            bar(done, of, f"{stage}: {note}")
            if stage == "writing" or done % 100 == 0 or done == of:
                err.print(f"{stage} {done}/{of} {note}", highlight=False)

        result = draft.make_draft(
            folder,
            out_folder,
            recipe,
            start=resolve(start, settings.home) if start else None,
            text_file=text,
            package=package,
            ranks=ranks,
            report=report,
        )
    if result is None:
        return
    out.print(
        f"{out_folder}: agrees with the target's greedy text on {result.agreement:.3f} of {result.held_out_tokens} held-out "
        f"tokens ({result.agreement_before:.3f} before distilling), loss {result.loss:.3f}; written in "
        f"{result.writing_seconds:.0f} s, trained in {result.training_seconds:.0f} s",
        highlight=False,
        soft_wrap=True,
    )
    write_json(json, asdict(result))
