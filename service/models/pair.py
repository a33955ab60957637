"""Loads a target and its draft, and checks that they are compatible."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_config
from mlx_lm.utils import load_model as load_weights

from service.core import ModelError, PairError, Provenance, panics_as_errors
from service.models import eagle
from service.models.arrays import named_arrays
from service.models.fingerprint import model_fingerprint, tokenizer_fingerprint, vocabulary_fingerprint
from service.models.model_files import check_files, one_line
from service.models.rope import check_rope, context_length, with_rope_keys
from service.models.templates import load_chat_tokenizer


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run. config: its config.json, with RoPE in the keys that mlx-lm reads. context: its maximum input in
    tokens, None if not given."""

    model: nn.Module
    tokenizer: TokenizerWrapper
    config: dict[str, Any]
    folder: Path
    fingerprint: str
    context: int | None


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its draft, None to serve without one.

    vocabulary: width of the target's logits. Tokens are sampled, and seeded noise is drawn, at this width, so that output does
    not depend on the draft. shared_vocabulary: ids below it exist in both models; it may lack added tokens of the tokenizer.
    provenance.draft is "" without a draft. eos: the target's end tokens.
    """

    target: Loaded
    draft: Loaded | None
    provenance: Provenance
    vocabulary: int
    shared_vocabulary: int
    eos: frozenset[int]


def load_model(folder: Path) -> Loaded:
    """Load a model through mlx-lm, for inference.

    On the CPU every floating-point weight (including scales and biases of quantised layers) becomes float32, the only precision
    that is fast and exact there. On Metal and CUDA, weights stay as stored. Raises ModelError.
    """
    model, tokenizer, config = _unread(folder)
    fingerprint = model_fingerprint(folder)
    with _as_model_error(f"the weights of {folder} cannot be read"):
        mx.eval(model.parameters())
    return Loaded(model, tokenizer, config, folder, fingerprint, context_length(config))


def unread_pair(target: Path, draft: Path | None) -> tuple[nn.Module, nn.Module | None]:
    """The models of a pair without reading their weights (except embeddings that both have), to compute sizes and to check
    before loading whether they can be served. Raises ModelError or PairError as `load_pair`."""
    target_model, target_tokenizer, _ = _unread(target)
    check_cache(target_model, "target")
    if draft is None:
        _checked_widths([target_model], target_tokenizer)
        return target_model, None
    draft_model, draft_tokenizer, _ = _unread(draft)
    with _as_model_error(f"{draft} cannot be used as a draft"):
        _check_draft((target_model, target_tokenizer), (draft_model, draft_tokenizer))
        _share_embeddings(target_model, draft_model)
    return target_model, draft_model


def _unread(folder: Path) -> tuple[nn.Module, TokenizerWrapper, dict[str, Any]]:
    """A model whose weights are read when they are first evaluated, its tokenizer, and its config.json with RoPE in the keys
    that mlx-lm reads. Raises ModelError, also if mlx-lm would ignore RoPE settings of config.json."""
    check_files(folder)
    with _as_model_error(f"{folder} cannot be loaded by mlx-lm"):
        written = load_config(folder)
        config = with_rope_keys(written)
        # mlx-lm reads the file itself and merges this into it, which removes no key.
        replaced = dict.fromkeys(written.keys() - config.keys())
        read = load_weights
        if eagle.is_eagle_config(config):
            read = partial(read, get_model_classes=eagle.model_classes)
        model, config = read(folder, lazy=True, model_config=config | replaced)
        check_rope(model, written)
        config = {name: value for name, value in config.items() if name not in replaced}
    with _as_model_error(f"the tokenizer of {folder} cannot be read"):
        tokenizer = load_chat_tokenizer(folder, config.get("eos_token_id"))
        if not _vocabulary(tokenizer):
            raise ModelError(f"the tokenizer of {folder} has no tokens")
    if mx.default_device().type == mx.cpu:
        model.set_dtype(mx.float32)
    model.eval()
    return model, tokenizer, config


@contextmanager
def _as_model_error(what: str) -> Generator[None]:
    """Raises a one-line ModelError for any error that a library raises on damaged files. what: the beginning of the line."""
    try:
        with panics_as_errors():
            yield
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{what}: {one_line(error)}") from error


def mlx_lm_runs(folder: Path) -> bool:
    """Whether mlx-lm can load and run a model folder by itself. It cannot run an EAGLE-3 head."""
    return not ((folder / "config.json").is_file() and eagle.is_eagle_config(load_config(folder)))


def load_pair(target: Path, draft: Path | None) -> Pair:
    """Load a target and a draft, and check that the draft can propose tokens to the target.

    Both must have the same tokenizer, and caches that can be truncated. Equal embeddings are shared. Raises ModelError, or
    PairError naming the cause.
    """
    target_model = load_model(target)
    check_cache(target_model.model, "target")
    draft_model = None
    if draft is not None:
        draft_model = load_model(draft)
        with _as_model_error(f"{draft} cannot be used as a draft"):
            _check_draft((target_model.model, target_model.tokenizer), (draft_model.model, draft_model.tokenizer))
            _share_embeddings(target_model.model, draft_model.model)
    models = [loaded.model for loaded in (target_model, draft_model) if loaded is not None]
    widths = _checked_widths(models, target_model.tokenizer)
    # Like provenance_of, with the fingerprints taken at loading.
    provenance = Provenance(
        target=target_model.fingerprint,
        tokenizer=tokenizer_fingerprint(target),
        draft=draft_model.fingerprint if draft_model else "",
    )
    return Pair(
        target_model,
        draft_model,
        provenance,
        widths[0],
        min(widths),
        frozenset(id for id in target_model.tokenizer.eos_token_ids if id < widths[0]),
    )


def check_fit(target: Path, draft: Path) -> None:
    """Refuse a draft that `load_pair` would refuse for this target. Reads tokenizers and configurations, but no weights. Raises
    ModelError, or PairError naming the cause."""
    target_model, target_tokenizer, _ = _unread(target)
    draft_model, draft_tokenizer, _ = _unread(draft)
    with _as_model_error(f"{draft} cannot be used as a draft"):
        _check_draft((target_model, target_tokenizer), (draft_model, draft_tokenizer))


def provenance_of(target: Path, draft: Path | None) -> Provenance:
    """The fingerprints of a pair, from its folders only. Raises ModelError."""
    return Provenance(
        target=model_fingerprint(target),
        tokenizer=tokenizer_fingerprint(target),
        draft=model_fingerprint(draft) if draft is not None else "",
    )


def check_cache(model: nn.Module, role: str) -> None:
    """Refuse a model whose cache the engine cannot replace.

    The engine has replacements for full and sliding-window attention and for recurrent states, but not for chunked, quantised
    or attention-sink caches. Raises PairError naming the model family and the cache.
    """
    family = getattr(model, "model_type", type(model).__module__.rsplit(".", 1)[-1])
    first, *rest = inspect.signature(model.__call__).parameters.values()
    needed = [p.name for p in rest if p.default is p.empty and p.kind not in {p.VAR_POSITIONAL, p.VAR_KEYWORD}]
    takes_cache = any(p.name == "cache" or p.kind is p.VAR_KEYWORD for p in rest)
    if needed or not takes_cache:
        wants = ", ".join([first.name, *needed])
        raise PairError(f"the {role} ({family}) is called with ({wants}), not with tokens and a cache alone")
    for layer, cache in enumerate(cast("list[object]", make_prompt_cache(model))):
        for part in cast("tuple[object, ...]", cache.caches) if isinstance(cache, CacheList) else (cache,):
            if type(part) in {KVCache, ArraysCache} or (type(part) is RotatingKVCache and part.keep == 0):
                continue
            kind = (
                "RotatingKVCache that keeps its first tokens" if type(part) is RotatingKVCache else type(part).__name__
            )
            raise PairError(f"the {role} ({family}) keeps a {kind} in layer {layer}, which cannot be rolled back")


def _check_draft(target: tuple[nn.Module, TokenizerWrapper], draft: tuple[nn.Module, TokenizerWrapper]) -> None:
    """Raises PairError if a draft cannot propose tokens to a target. Binds an EAGLE-3 head to it."""
    check_cache(draft[0], "draft")
    _check_tokenizers(target[1], draft[1])
    eagle.bind(draft[0], target[0])
    _checked_widths([target[0], draft[0]], target[1])


def _check_tokenizers(target: TokenizerWrapper, draft: TokenizerWrapper) -> None:
    ours, theirs = _vocabulary(target), _vocabulary(draft)
    if vocabulary_fingerprint(ours) != vocabulary_fingerprint(theirs):
        differing = sorted(ours.items() ^ theirs.items(), key=lambda item: (item[1], item[0]))
        token, id = differing[0]
        raise PairError(
            f"target and draft map tokens to different ids ({len(differing)} entries differ, the first is {token!r} = "
            f"{id}): a draft must use the target's own vocabulary"
        )
    for name, left, right in (
        ("beginning-of-text token", target.bos_token_id, draft.bos_token_id),
        ("special tokens", _special_ids(target), _special_ids(draft)),
    ):
        if left != right:
            raise PairError(f"target and draft differ in their {name}: {left} and {right}")
    # The target's end tokens end an answer. Conversions of one family list different subsets of them.
    ends = [sorted(tokenizer.eos_token_ids) for tokenizer in (target, draft)]
    if not set(ends[0]) & set(ends[1]):
        raise PairError(f"target and draft differ in their end tokens: {ends[0]} and {ends[1]}")


def _checked_widths(models: Sequence[nn.Module], tokenizer: TokenizerWrapper) -> list[int]:
    """Widths of the logits of a target and of its draft, if there is one. Raises PairError if they are too narrow.

    Both may lack added tokens at the end, such as Gemma 3's image token, which only its larger models have. Prompts with ids
    that the target lacks are refused. The draft reads its last token in place of ids that it lacks, and does not propose them.
    """
    widths = [logits_width(model) for model in models]
    ids = set(_vocabulary(tokenizer).values())
    needed = max(ids - set(tokenizer.get_added_vocab().values()), default=0) + 1
    for role, width in zip(("target", "draft"), widths, strict=False):
        if width < needed:
            raise PairError(f"the {role}'s logits cover {width} tokens, but the tokenizer has {max(ids) + 1}")
    return widths


def _vocabulary(tokenizer: TokenizerWrapper) -> dict[str, int]:
    return cast("dict[str, int]", tokenizer.get_vocab())


def _special_ids(tokenizer: TokenizerWrapper) -> list[int]:
    return sorted(id for id, token in tokenizer.added_tokens_decoder.items() if token.special)


def logits_width(model: nn.Module) -> int:
    """V of a model's logits (B, N, V)."""
    # Lazy: only the shape is needed, and nothing is computed.
    return cast("mx.array", model(mx.zeros((1, 1), dtype=mx.int32), cache=make_prompt_cache(model))).shape[-1]


def _share_embeddings(target: nn.Module, draft: nn.Module) -> None:
    """Replace the draft's input and output embeddings by the target's arrays if they are equal, to save memory."""
    ours = dict(named_arrays(target.parameters()))
    shared: list[tuple[str, mx.array]] = []
    for name, array in named_arrays(draft.parameters()):
        mine = ours.get(name)
        if mine is None or not ("embed_tokens" in name or "lm_head" in name):
            continue
        if mine.shape == array.shape and mine.dtype == array.dtype and mx.array_equal(mine, array).item():
            shared.append((name, mine))
    draft.update(cast("dict[str, Any]", tree_unflatten(shared)))
