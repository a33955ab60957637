"""A look at start: does this very model give, in ragged rows of our cache, what it gives in mlx-lm's own?"""

from __future__ import annotations

from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from service.core import PairError
from service.engine.cache import RowCache

_ROWS = ((11, 7, 19, 5, 3, 2, 13, 8, 9), (4, 17, 6, 12, 7), (21, 9, 3, 10))
"""All but the last four tokens are read before they meet: nothing of the last row."""
_TOLERANCE = 0.02
"""Of the logits' range, in half precision; float32 must be a hundred times closer."""


def check_rows(model: nn.Module, role: str) -> None:
    """Decode rows of unlike length together, roll unlike numbers of tokens back, and compare logits with mlx-lm's decode of
    each alone.

    Raises PairError naming the family: better refused at start than subtly wrong (or broken) at the first request.
    """
    family = getattr(model, "model_type", type(model).__module__.rsplit(".", 1)[-1])
    try:
        apart = [_alone(model, row) for row in _ROWS]
        mx.eval(apart)
    except Exception as error:
        raise PairError(f"the {role} ({family}) does not run on this device: {error}") from error
    try:
        together = _together(model)
        mx.eval(together)
    except PairError as error:
        raise PairError(f"the {role} ({family}) cannot be served: {error}") from error
    except Exception as error:
        raise PairError(
            f"the {role} ({family}) does not run on rows of unlike length (most such families compute positions from one "
            f"length for the whole batch): {error}"
        ) from error
    precise = apart[0].dtype == mx.float32
    for row, (ours, theirs) in enumerate(zip(together, apart, strict=True)):
        # Some families rule tokens out with -inf.
        there = mx.isfinite(theirs)
        if not _number((there == mx.isfinite(ours)).all()):
            raise PairError(f"the {role} ({family}) rules out other tokens in a batch than alone (row {row})")
        ours, theirs = (mx.where(there, logits.astype(mx.float32), 0.0) for logits in (ours, theirs))
        span = _number(theirs.max() - theirs.min())
        exact = precise and mx.default_device().type == mx.cpu
        allowed = max(span, 1e-6) * (_TOLERANCE / 100 if exact else _TOLERANCE)
        gap = _number(mx.abs(ours - theirs).max())
        if not gap <= allowed:
            raise PairError(
                f"the {role} ({family}) gives other logits in a batch than alone (row {row}: {gap:.3g}, allowed {allowed:.3g})"
            )


def _number(scalar: mx.array) -> float:
    return float(cast("float", scalar.item()))


def _alone(model: nn.Module, row: tuple[int, ...]) -> mx.array:
    """Logits (V,) after the last token."""
    cache = make_prompt_cache(model)
    model(mx.array([row[:-1]]), cache=cache)
    return model(mx.array([row[-1:]]), cache=cache)[0, -1]


def _together(model: nn.Module) -> list[mx.array]:
    batch = RowCache(model, 0)
    for row in _ROWS:
        own = RowCache(model, 1)
        if read := row[:-4]:
            model(mx.array([read]), cache=own.layers)
            own.commit(len(read))
        batch.join([own])
    # Three tokens each, of which rows keep one, two and all, the others being wrong and taken back; then what is missing.
    kept = [1 + i % 3 for i in range(len(_ROWS))]
    fed = [[*row[-4:][:n], 1, 1][:3] for row, n in zip(_ROWS, kept, strict=True)]
    model(mx.array(fed), cache=batch.layers)
    batch.settle([len(row) - 4 + n for row, n in zip(_ROWS, kept, strict=True)])
    fed = [[*row[len(row) - 4 + n :], 1, 1][:3] for row, n in zip(_ROWS, kept, strict=True)]
    logits = model(mx.array(fed), cache=batch.layers)
    return [logits[i, 3 - n] for i, n in enumerate(kept)]
