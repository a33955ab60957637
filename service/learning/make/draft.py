"""`redraft make-draft`: initialises a draft from its target, lets the target write text, distils the draft on it,
measures it."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from service.core import ModelError, TrainingOutOfMemory
from service.engine import device
from service.learning.draft_steps import UNROLLED
from service.learning.export import save_model_folder
from service.learning.general_set import GeneralSet
from service.learning.loading import logits_width
from service.learning.make.distil import LOGITS_COPIES, Distillation, batch_count, batches, freeze_shared
from service.learning.make.eagle_head import init_eagle_head
from service.learning.make.prune import DEFAULT_LAYERS, prune
from service.learning.make.target_text import ANSWER, TargetText, first_exchanges, write_text
from service.learning.practice_text import PracticeText, mixed
from service.learning.ranks import Ranks
from service.learning.recompute import recomputed_blocks
from service.learning.train import Optimiser, TrainReport, train
from service.models import eagle, vocabulary
from service.models.arrays import named_arrays
from service.models.draft_choice import write_made_for
from service.models.heads import cut
from service.models.pair import Loaded, load_model
from service.models.shipped import GENERAL, OPENINGS, extract
from service.models.training_memory import TrainingPlan, TrainingShape, plan_training, smallest_plan, with_logits

Report = Callable[[str, int, int, str], None]
"""(stage, done, of, note)"""
KINDS = ("layers", "eagle")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a draft is made.

    kind: "layers" (some of the target's) or "eagle" (one layer that reads the target's hidden states). layers: the
    target's layers that the draft consists of, or reads; negative ones count from the end; None:
    `prune.DEFAULT_LAYERS`, or `eagle_head.default_feature_layers`. tokens: number of tokens the target writes, in rows
    of `length`, `rows` at a time; several processes share them. greedy, openings, turn: see `write_text`. blend: see
    `Distillation`. held_out: greedy rows to measure on. general: greedy rows whose first exchanges form the general
    set. vocabulary: size of the reduced vocabulary, the most frequent tokens of the answers written by the first
    process (0: all).
    """

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
    """layers: counted from the first. tokens: of training text. agreement: fraction of held-out greedy answer tokens
    that are the draft's argmax, before and after distilling. by_step: after distilling, in each draft step, given that
    the earlier steps were right. loss: mean of the last losses."""

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
    """Writes a draft as a standard model folder `out`, with a note of the target it was made from (`draft_choice`).

    start: continue training this draft, of the same kind and layers. text_file: read the training text from this file,
    or write it there if the file does not exist. package: also write what ships with the package (the draft's own
    weights in bfloat16, and the general set). ranks: the processes that make the draft together; their recipes may
    differ only in length, rows and batch. Only the first measures and writes the draft, the others return None.

    Raises ModelError, TrainingFailed; `out` exists only after success.
    """
    ranks = ranks or Ranks()
    if out.exists():
        raise ModelError(f"{out} already exists")
    dtype = {"float32": mx.float32, "bfloat16": mx.bfloat16}[recipe.dtype]
    target = load_model(target_folder)
    scratch = out.with_name(f".{out.name}.partial{ranks.index or ''}")
    shutil.rmtree(scratch, ignore_errors=True)
    layers = _initialise(target, recipe, scratch)
    draft = _load_initial(scratch, start)
    stored_dtypes = _prepare_training(draft)
    target.model.set_dtype(dtype)
    # Both casts are done: memory free at this point is available for training.
    mx.eval(target.model.parameters(), draft.parameters())
    _plan(draft, scratch, recipe, recipe.length)
    eagle.bind(draft, target.model)

    started = time.perf_counter()
    text = training_text(target, recipe, text_file, ranks, report)
    written_at = time.perf_counter()
    loss = Distillation(target.model, dtype, blend=recipe.blend)
    plan = _plan(draft, scratch, recipe, text.tokens.shape[1])
    steps = min(ranks.gather(batch_count(text, recipe.batch, recipe.epochs)))
    tokens = sum(ranks.gather(text.tokens.size))
    if not ranks.first:
        shutil.rmtree(scratch)
        _distil(draft, text, recipe, plan, steps, loss, ranks, report)
        return None
    answers = _write(target, recipe, rows=recipe.held_out + recipe.general, seed=recipe.seed, greedy=1.0)
    held_out = answers.first(recipe.held_out)
    before, _ = loss.agreement(draft, held_out)
    trained = _distil(draft, text, recipe, plan, steps, loss, ranks, report)
    after, compared = loss.agreement(draft, held_out)

    weights = {name: array.astype(stored_dtypes[name]) for name, array in named_arrays(draft.parameters())}
    config = json.loads((scratch / "config.json").read_text(encoding="utf-8"))
    save_model_folder(weights, config, target.folder, scratch)
    if recipe.vocabulary:
        _write_vocabulary(target, draft, text, recipe.vocabulary, scratch, report)
    if recipe.openings:
        (scratch / OPENINGS).write_text("\n".join(recipe.openings) + "\n", encoding="utf-8")
    write_made_for(scratch, target.fingerprint)
    scratch.rename(out)
    if package is not None:
        _write_package(target, out, answers, recipe, package)
    return DraftReport(
        layers=tuple(layers),
        tokens=tokens,
        agreement_before=before[0],
        agreement=after[0],
        by_step=tuple(after),
        held_out_tokens=compared,
        loss=trained.loss,
        writing_seconds=written_at - started,
        training_seconds=trained.seconds,
    )


def training_text(target: Loaded, recipe: Recipe, file: Path | None, ranks: Ranks, report: Report) -> TargetText:
    """This process's training text: read from `file`, or written by the target and saved there. When several processes
    share the work, each has its own file, "NAME-RANK". A folder means all practice text in it. Raises ModelError if it
    holds none."""
    if file is not None and file.is_dir():
        return _practice_text(file)
    if file is not None:
        # NumPy would add the suffix. The folder is created now, because writing takes hours.
        file = file if file.suffix == ".npz" else file.with_name(f"{file.name}.npz")
        file.parent.mkdir(parents=True, exist_ok=True)
    if file is not None and ranks.count > 1:
        file = file.with_stem(f"{file.stem}-{ranks.index}")
    if file is not None and file.is_file():
        return TargetText.load(file)
    parts: list[TargetText] = []
    size = recipe.rows * recipe.length
    count = -(-recipe.tokens // (size * ranks.count))
    for part in range(count):
        started = time.perf_counter()
        seed = recipe.seed + 1 + part * ranks.count + ranks.index
        parts.append(_write(target, recipe, rows=recipe.rows, seed=seed, greedy=recipe.greedy))
        mx.clear_cache()
        report("writing", part + 1, count, f"{size / (time.perf_counter() - started):,.0f} tokens/s")
    text = TargetText.joined(parts)
    if file is not None:
        text.save(file)
    return text


def _practice_text(folder: Path) -> TargetText:
    """The practice text of one target, both kinds in equal parts. Raises ModelError if there is none."""
    pieces = list(PracticeText(folder.parent, folder.name).pieces())
    if not pieces:
        raise ModelError(f"{folder} contains no practice text")
    return mixed(pieces)


def _check_same_shape(draft: nn.Module, fresh: nn.Module, start: Path) -> None:
    """Raises ModelError when `draft`, loaded from `start`, differs from `fresh` in kind, number of layers or feature layers."""
    shapes = [{name: array.shape for name, array in named_arrays(model.parameters())} for model in (draft, fresh)]
    if shapes[0] != shapes[1]:
        raise ModelError(
            f"{start.name} is not a draft for this target of this kind and number of layers: its weights have other shapes"
        )
    read, wanted = ([*model.args.taps] if isinstance(model, eagle.Model) else [] for model in (draft, fresh))
    if read != wanted:
        raise ModelError(f"{start.name} reads layers {read} of its target, not {wanted}: pass these with --layers")


def _initialise(target: Loaded, recipe: Recipe, folder: Path) -> list[int]:
    """Writes the untrained draft. Returns its layers counted from the first."""
    if recipe.kind == "eagle":
        return init_eagle_head(target, recipe.layers, folder)
    return prune(target, DEFAULT_LAYERS if recipe.layers is None else recipe.layers, folder)


def _load_initial(scratch: Path, start: Path | None) -> nn.Module:
    fresh = load_model(scratch).model
    if start is None:
        return fresh
    draft = load_model(start).model
    _check_same_shape(draft, fresh, start)
    return draft


def _prepare_training(draft: nn.Module) -> dict[str, mx.Dtype]:
    """Makes the draft's own weights trainable, in float32, because small updates would vanish in bfloat16. Returns
    their original dtypes, in which they are saved. Raises ModelError if some are quantised."""
    freeze_shared(draft)
    for name, array in named_arrays(draft.trainable_parameters()):
        if not mx.issubdtype(array.dtype, mx.floating):
            raise ModelError(
                f"{name} is quantised in a way that cannot be undone here (experts are): use a target that is not"
            )
    dtypes = {name: array.dtype for name, array in named_arrays(draft.parameters())}
    draft.update(tree_map(lambda array: array.astype(mx.float32), draft.trainable_parameters()))
    return dtypes


def _plan(draft: nn.Module, folder: Path, recipe: Recipe, length: int) -> TrainingPlan:
    """How a batch of texts of this length is computed in the memory that the models leave. folder: contains the draft's
    config.json. Raises TrainingOutOfMemory when not even one text fits."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    steps = UNROLLED if isinstance(draft, eagle.Model) else 1
    # Gradients, their sum and both moments of AdamW; plus all weights as cast by the loss.
    own = 4 * sum(array.nbytes for _, array in named_arrays(draft.trainable_parameters()))
    own += sum(array.size * mx.float32.size for _, array in named_arrays(draft.parameters()))
    value = {"float32": mx.float32, "bfloat16": mx.bfloat16}[recipe.dtype].size
    shape = TrainingShape.of(config, weights=own, value=value, rank=0, steps=steps)
    shape = with_logits(shape, vocabulary=logits_width(folder), copies=LOGITS_COPIES)
    free = device.free_bytes()
    plan = plan_training(shape, free, batch=recipe.batch, length=length, shortest=length)
    if plan is None:
        least = smallest_plan(shape, batch=recipe.batch, length=length, shortest=length)
        raise TrainingOutOfMemory(
            f"distilling takes {least.peak_bytes / 2**30:.1f} GiB of memory besides the models for one text of "
            f"{length} tokens, and {free / 2**30:.1f} GiB are free: use a smaller --length"
        )
    return plan


def _write(target: Loaded, recipe: Recipe, *, rows: int, seed: int, greedy: float) -> TargetText:
    return write_text(
        target,
        rows=rows,
        length=recipe.length,
        seed=seed,
        greedy=greedy,
        openings=recipe.openings,
        turn=recipe.turn,
    )


def _distil(
    draft: nn.Module,
    text: TargetText,
    recipe: Recipe,
    plan: TrainingPlan,
    steps: int,
    loss: Distillation,
    ranks: Ranks,
    report: Report,
) -> TrainReport:
    """Trains with `steps` batches. All processes have the same number; each computes them by its own plan."""
    with recomputed_blocks(draft, on=plan.recompute):
        return train(
            draft,
            islice(batches(text, recipe.batch, recipe.epochs, recipe.seed), steps),
            loss_fn=loss,
            optimiser=Optimiser(learning_rate=recipe.learning_rate, steps=steps, warmup=0.02, weight_decay=0.01),
            on_progress=lambda p: report("distilling", p.step, p.steps, f"loss {p.loss or 0.0:.3f}"),
            ranks=ranks,
            rows=plan.rows,
        )


def _write_vocabulary(
    target: Loaded, draft: nn.Module, text: TargetText, size: int, folder: Path, report: Report
) -> None:
    """Writes the reduced vocabulary, unless this draft's head cannot be cut."""
    answered = [tokens[role == ANSWER] for tokens, role in zip(text.tokens, text.role, strict=True)]
    width = max(target.tokenizer.get_vocab().values()) + 1
    ids = vocabulary.ranked(answered, sorted(target.tokenizer.eos_token_ids), width)[:size]
    try:
        cut(draft, ids)
    except ModelError as error:
        report("writing the vocabulary", 0, 1, f"left out: {error}")
    else:
        vocabulary.write(ids, folder)


def _write_package(target: Loaded, draft: Path, answers: TargetText, recipe: Recipe, package: Path) -> None:
    package.mkdir(parents=True, exist_ok=True)
    extract(draft, package)
    if recipe.general:
        ends = frozenset(target.tokenizer.eos_token_ids)
        GeneralSet.of(first_exchanges(answers, recipe.held_out, ends)).save(package / GENERAL)
