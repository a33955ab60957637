"""A look at start: does this very model give, in ragged rows of our cache, what it gives in mlx-lm's own?"""

from __future__ import annotations

from typing import cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from service.core import PairError
from service.engine.cache import RowCache

_ROWS = ((11, 7, 19, 5, 3, 2, 13), (4, 17, 6))
_TOLERANCE = 0.02
"""Of the logits' range, in half precision; float32 must be a hundred times closer."""


def check_rows(model: nn.Module, role: str) -> None:
    """Decode two rows of unlike length together, roll one token back, and compare logits with mlx-lm's decode of each alone.

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
        model(mx.array([row[:-2]]), cache=own.layers)
        own.commit(len(row) - 2)
        batch.join([own])
    # Two tokens each, of which the second is wrong and taken back; then the right one.
    model(mx.array([[row[-2], 1] for row in _ROWS]), cache=batch.layers)
    batch.rewind([len(row) - 1 for row in _ROWS])
    logits = model(mx.array([row[-1:] for row in _ROWS]), cache=batch.layers)
    return [logits[i, -1] for i in range(len(_ROWS))]
