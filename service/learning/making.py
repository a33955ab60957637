"""`redraft make-draft`: a draft for any target, from the target alone: begin, let the target write, distil, measure."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map

from service.core import ModelError
from service.learning.buffer import GeneralSet
from service.learning.distil import Distillation, batch_count, batches, begun, freeze_shared
from service.learning.prune import prune, save
from service.learning.ranks import Ranks
from service.learning.sprout import sprout
from service.learning.trainer import Optimiser, TrainReport, train
from service.learning.writing import ANSWER, Text, write
from service.models import eagle, vocabulary
from service.models.heads import cut
from service.models.pair import Loaded, load_model
from service.models.shipped import GENERAL, extract

Report = Callable[[str, int, int, str], None]
"""(stage, done, of, note)"""
KINDS = ("layers", "eagle")
_USUAL = (0, 1, -2, -1)
"""Layers that are kept where none are named."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """kind: "layers", some of the target's, or "eagle", one layer that reads the target's hidden states. layers: the target's
    that are kept, or read; negative ones from the end; None: 0, 1, -2 and -1, or see `sprout.usual`. tokens: how many the
    target writes, in rows of `length`, `rows` at a time; several processes share them. greedy, openings, turn: see `write`.
    blend: see `Distillation`. held_out: greedy rows kept for measuring. general: first exchanges of greedy rows kept as the
    replay set. vocabulary: tokens the draft may propose, the most frequent ones of the answers that the first process wrote
    (0: all)."""

    layers: tuple[int, ...] | None
    tokens: int
    kind: str = "layers"
    length: int = 384
    rows: int = 64
    epochs: int = 2
    batch: int = 64
    learning_rate: float = 1e-3
    seed: int = 0
    held_out: int = 64
    general: int = 0
    vocabulary: int = 8192
    dtype: str = "float32"
    greedy: float = 0.25
    openings: tuple[str, ...] = ()
    turn: int | None = None
    blend: bool = False


@dataclass(frozen=True, slots=True)
class DraftReport:
    """agreement: share of held-out greedy answer tokens that the draft's argmax predicts, before and after distilling; by_step:
    after, in each step of a round that is learnt, had the steps before it been right. layers: counted from the first."""

    layers: tuple[int, ...]
    tokens: int
    agreement_before: float
    agreement: float
    by_step: tuple[float, ...]
    held_out_tokens: int
    loss: float
    writing_seconds: float
    training_seconds: float


def make_draft(
    target_folder: Path,
    out: Path,
    recipe: Recipe,
    *,
    start: Path | None = None,
    text_file: Path | None = None,
    package: Path | None = None,
    ranks: Ranks | None = None,
    report: Report = lambda stage, done, of, note: None,
) -> DraftReport | None:
    """Write a standard model folder `out`.

    start: go on from this draft of the same kind and layers instead of the target's bare ones. text_file: reuse the text kept
    there, or keep it there once written. package: also write what ships with the package (the draft's own weights in bfloat16,
    and the replay set). ranks: the processes that make it together, each with a recipe like the first one's but for length,
    rows and batch; only the first measures and writes the draft, the others return None. Raises ModelError, TrainingFailed;
    `out` appears only when everything went well.
    """
    ranks = ranks or Ranks()
    if out.exists():
        raise ModelError(f"{out} exists already")
    dtype = {"float32": mx.float32, "bfloat16": mx.bfloat16}[recipe.dtype]
    target = load_model(target_folder)
    scratch = out.with_name(f".{out.name}.partial{ranks.index or ''}")
    shutil.rmtree(scratch, ignore_errors=True)
    if recipe.kind == "eagle":
        layers = sprout(target, recipe.layers, scratch)
    else:
        layers = prune(target, _USUAL if recipe.layers is None else recipe.layers, scratch)
    draft = load_model(scratch if start is None else start).model
    if start is not None:
        check_same_shape(draft, load_model(scratch).model, start)
    freeze_shared(draft)
    # Trained weights are kept in float32 and cast for each step: small updates would vanish in bfloat16.
    precision = {name: array.dtype for name, array in _named(draft)}
    draft.update(tree_map(lambda array: array.astype(mx.float32), draft.trainable_parameters()))
    target.model.set_dtype(dtype)
    eagle.bind(draft, target.model)

    begun = time.perf_counter()
    text = _text(target, recipe, text_file, ranks, report)
    written_at = time.perf_counter()
    loss = Distillation(target.model, dtype, blend=recipe.blend)
    steps = min(ranks.gather(batch_count(text, recipe.batch, recipe.epochs)))
    tokens = sum(ranks.gather(text.tokens.size))

    def distil() -> TrainReport:
        return train(
            draft,
            islice(batches(text, recipe.batch, recipe.epochs, recipe.seed), steps),
            loss_fn=loss,
            optimiser=Optimiser(learning_rate=recipe.learning_rate, steps=steps, warmup=0.02, weight_decay=0.01),
            on_progress=lambda p: report("distilling", p.step, p.steps, f"loss {p.loss or 0.0:.3f}"),
            ranks=ranks,
        )

    if not ranks.first:
        shutil.rmtree(scratch)
        distil()
        return None
    answers = write(
        target,
        rows=recipe.held_out + recipe.general,
        length=recipe.length,
        seed=recipe.seed,
        greedy=1.0,
        openings=recipe.openings,
        turn=recipe.turn,
    )
    held_out = Text(*(a[: recipe.held_out] for a in (answers.tokens, answers.role, answers.temperature)))
    before, _ = agreement(draft, held_out, loss)
    trained = distil()
    after, compared = agreement(draft, held_out, loss)

    weights = {name: array.astype(precision[name]) for name, array in _named(draft)}
    config = json.loads((scratch / "config.json").read_text(encoding="utf-8"))
    save(weights, config, target.folder, scratch)
    if recipe.vocabulary:
        answered = [tokens[role == ANSWER] for tokens, role in zip(text.tokens, text.role, strict=True)]
        width = max(target.tokenizer.get_vocab().values()) + 1
        ids = vocabulary.ranked(answered, sorted(target.tokenizer.eos_token_ids), width)
        try:
            cut(draft, ids[: recipe.vocabulary])
        except ModelError as error:
            report("writing the vocabulary", 0, 1, f"left out: {error}")
        else:
            vocabulary.write(ids[: recipe.vocabulary], scratch)
    scratch.rename(out)
    if package is not None:
        package.mkdir(parents=True, exist_ok=True)
        extract(out, package)
        if recipe.general:
            ends = frozenset(target.tokenizer.eos_token_ids)
            GeneralSet.of(first_exchanges(answers, recipe.held_out, ends)).save(package / GENERAL)
    return DraftReport(
        layers=tuple(layers),
        tokens=tokens,
        agreement_before=before[0],
        agreement=after[0],
        by_step=tuple(after),
        held_out_tokens=compared,
        loss=trained.loss,
        writing_seconds=written_at - begun,
        training_seconds=trained.seconds,
    )


def check_same_shape(draft: nn.Module, fresh: nn.Module, start: Path) -> None:
    """Raises ModelError when `start` is not a draft of the same kind and number of layers, or reads others."""
    shapes = [{name: array.shape for name, array in _named(model)} for model in (draft, fresh)]
    if shapes[0] != shapes[1]:
        raise ModelError(
            f"{start.name} is no draft of this target of this kind with so many layers: its weights have other shapes"
        )
    read, wanted = ([*model.args.taps] if isinstance(model, eagle.Model) else [] for model in (draft, fresh))
    if read != wanted:
        raise ModelError(f"{start.name} reads layers {read} of its target, not {wanted}: name these with --layers")


def _named(model: nn.Module) -> list[tuple[str, mx.array]]:
    return cast("list[tuple[str, mx.array]]", tree_flatten(model.parameters()))


def _text(target: Loaded, recipe: Recipe, kept: Path | None, ranks: Ranks, report: Report) -> Text:
    """This process's training text, from `kept` where it is, else written by the target wave by wave."""
    if kept is not None and ranks.count > 1:
        kept = kept.with_stem(f"{kept.stem}-{ranks.index}")
    if kept is not None and kept.is_file():
        with np.load(kept, allow_pickle=False) as stored:
            return Text(stored["tokens"], stored["role"], stored["temperature"])
    waves: list[Text] = []
    size = recipe.rows * recipe.length
    count = -(-recipe.tokens // (size * ranks.count))
    for wave in range(count):
        begun = time.perf_counter()
        waves.append(
            write(
                target,
                rows=recipe.rows,
                length=recipe.length,
                seed=recipe.seed + 1 + wave * ranks.count + ranks.index,
                greedy=recipe.greedy,
                openings=recipe.openings,
                turn=recipe.turn,
            )
        )
        mx.clear_cache()
        report("writing", wave + 1, count, f"{size / (time.perf_counter() - begun):,.0f} tokens/s")
    text = Text(*(np.concatenate([getattr(w, name) for w in waves]) for name in ("tokens", "role", "temperature")))
    if kept is not None:
        np.savez(kept, tokens=text.tokens, role=text.role, temperature=text.temperature)
    return text


def agreement(draft: nn.Module, text: Text, run: Distillation, rows: int = 16) -> tuple[list[float], int]:
    """Share of the answers' tokens that are the draft's argmax, in each step of a round that it learns, the steps before taken
    for right; and how many tokens were compared in the first."""
    agreed, compared = list[int](), list[int]()
    for start in range(0, len(text.tokens), rows):
        tokens, role = text.tokens[start : start + rows], text.role[start : start + rows]
        inputs = mx.array(tokens[:, :-1])
        for step, guess in enumerate(run.guesses(draft, inputs)):
            if step == len(agreed):
                agreed.append(0)
                compared.append(0)
            answers = (role[:, 1:] == ANSWER) & np.array(begun(step, inputs))
            agreed[step] += int(((np.array(guess) == tokens[:, 1:]) & answers).sum())
            compared[step] += int(answers.sum())
    return [right / max(of, 1) for right, of in zip(agreed, compared, strict=True)], compared[0]


def first_exchanges(
    text: Text, skip: int, ends: Collection[int], longest: int = 128
) -> Iterator[tuple[list[int], list[int]]]:
    """(prompt, output) of each row's first turn and its answer, at most `longest` tokens, rows before `skip` left out."""
    for tokens, role in zip(text.tokens[skip:].tolist(), text.role[skip:], strict=True):
        answers = np.flatnonzero(role == ANSWER)
        if not len(answers):
            continue
        start = int(answers[0])
        stop = next((at + 1 for at in range(start, len(tokens)) if tokens[at] in ends), len(tokens))
        yield tokens[:start], tokens[start : min(stop, start + longest)]
