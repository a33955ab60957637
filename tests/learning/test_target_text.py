"""Practice texts that a tiny target writes, and the losses that a draft is trained with on them."""

from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from service.core import NonFiniteLogits
from service.learning.make.distil import Distillation, TextBatch
from service.learning.make.target_text import ANSWER, FORCED, USER, TargetText, write_text
from service.models import heads
from service.models.pair import Loaded, load_model
from tests.support.model_folders import save_model
from tests.support.oracle import noisy_copy, tiny_llama
from tests.support.typed import leaves

END, FIRST = 1, 2
"""Ids of the tiny tokenizer, which has no chat template: turns begin with the beginning-of-text token."""


@pytest.fixture
def target(tmp_path: Path) -> Loaded:
    return load_model(save_model(tiny_llama(1), tmp_path / "target"))


def turns(text: TargetText) -> list[tuple[int, list[int], list[int]]]:
    """(role, forced opening, written tokens) of every finished turn."""
    found: list[tuple[int, list[int], list[int]]] = []
    for tokens, role in zip(text.tokens.tolist(), text.role.tolist(), strict=True):
        starts = [i for i, token in enumerate(tokens) if token == FIRST and role[i] == FORCED]
        for start, stop in pairwise(starts):
            span = range(start + 1, stop)
            written_at = [i for i in span if role[i] != FORCED]
            if written_at:
                lead = [tokens[i] for i in span if i < written_at[0]]
                found.append((role[written_at[0]], lead, [tokens[i] for i in written_at]))
    return found


def test_user_turns_start_with_the_openings_and_no_turn_exceeds_its_limit(target: Loaded) -> None:
    text = write_text(target, rows=8, length=120, seed=3, openings=("w7", "w9", ""), turn=10)
    found = turns(text)
    leads = {role: {tuple(lead) for who, lead, _ in found if who == role} for role in (USER, ANSWER)}
    assert leads == {USER: {(7,), (9,), ()}, ANSWER: {()}}
    assert max(len(written_ids) for _, _, written_ids in found) == 10
    # Tokens that the writer did not produce are not learnt: the end token of a cut turn is forced.
    cut = [written_ids for _, _, written_ids in found if len(written_ids) == 10 and written_ids[-1] != END]
    assert cut
    assert np.array_equal(text.role[:, 0], np.full(8, FORCED))


def test_without_openings_nothing_is_forced(target: Loaded) -> None:
    text = write_text(target, rows=4, length=60, seed=3)
    assert all(lead == [] and written_ids[-1] == END for _, lead, written_ids in turns(text))


def test_texts_with_logits_that_are_not_finite_are_left_out(target: Loaded) -> None:
    """The others are what they would have been; where no text is left there is nothing to learn from."""
    sound = write_text(target, rows=8, length=60, seed=3)
    counts = [int((sound.tokens == token).any(axis=1).sum()) for token in range(97)]
    bad = next(token for token in range(3, 97) if 2 <= counts[token] <= 6)
    embeddings = dict(leaves(target.model.parameters()))["model.embed_tokens.weight"]
    embeddings[bad] = float("nan")
    # A token that ends a text spoils nothing any more.
    clean = ~(sound.tokens[:, :-1] == bad).any(axis=1)
    found = write_text(target, rows=8, length=60, seed=3)
    assert 2 <= len(found.tokens) == clean.sum() <= 7
    assert np.array_equal(found.tokens, sound.tokens[clean]) and np.array_equal(found.role, sound.role[clean])
    assert np.array_equal(found.temperature, sound.temperature[clean])
    embeddings[FIRST] = float("nan")
    with pytest.raises(NonFiniteLogits):
        write_text(target, rows=8, length=60, seed=3)


def probabilities(logits: mx.array) -> np.ndarray:
    return np.array(mx.softmax(logits.astype(mx.float32), axis=-1), dtype=np.float64)


def test_the_losses_equal_their_definitions(target: Loaded) -> None:
    draft = noisy_copy(tiny_llama(1), 5, 0.3)
    tokens = np.random.default_rng(0).integers(3, 97, (2, 12)).astype(np.int32)
    written = np.ones((2, 11), dtype=np.float32)
    written[0, :5] = 0.0
    p, q = (probabilities(model(mx.array(tokens[:, :-1]))) for model in (target.model, draft))
    kl = float((np.sum(p * np.log(p / q), axis=-1) * written).sum() / written.sum())
    apart = float((np.abs(p - q).sum(axis=-1) * written).sum() / written.sum() / 2)
    batch = TextBatch(tokens, mx.array(written))
    weight = np.exp(-3.0 * (1.0 - apart))
    expected = {False: kl, True: weight * kl + (1.0 - weight) * apart}
    for blend, value in expected.items():
        loss = Distillation(target.model, mx.float32, blend=blend)(draft, batch)
        assert loss.item() == pytest.approx(value, rel=1e-4)
    nothing = TextBatch(tokens, mx.array(np.zeros((2, 11), dtype=np.float32)))
    assert Distillation(target.model, mx.float32, blend=True)(draft, nothing).item() == 0.0


def test_heads_cut_to_the_same_ids_are_compared_over_these_and_the_batch_s_own() -> None:
    leader, draft = tiny_llama(1), noisy_copy(tiny_llama(1), 5, 0.3)
    tokens = np.random.default_rng(0).integers(3, 97, (2, 12)).astype(np.int32)
    ids = [90, 3, 17, 40, 41]
    either = sorted({*ids, *tokens.ravel().tolist()})
    assert len(ids) < len(either) < draft.args.vocab_size
    p, q = (probabilities(model(mx.array(tokens[:, :-1]))[..., mx.array(either)]) for model in (leader, draft))
    for model in (leader, draft):
        heads.cut(model, ids)
    batch = TextBatch(tokens, mx.array(np.ones((2, 11), dtype=np.float32)))
    loss = Distillation(leader, mx.float32)(draft, batch)
    assert loss.item() == pytest.approx(float(np.sum(p * np.log(p / q), axis=-1).mean()), rel=1e-4)
    assert draft(mx.array(tokens)).shape[-1] == draft.args.vocab_size, "elsewhere logits are as wide as before"


@pytest.mark.parametrize("ids", [None, [80, 3, 17, 40, 41]])
@pytest.mark.parametrize("widths", [(97, 85), (85, 97)])
def test_of_models_of_unlike_width_the_ids_count_that_both_have(widths: tuple[int, int], ids: list[int] | None) -> None:
    leader, draft = (tiny_llama(seed, vocabulary=width) for seed, width in enumerate(widths))
    tokens = np.random.default_rng(0).integers(3, widths[0], (2, 12)).astype(np.int32)
    assert tokens.max() >= min(widths) or widths[0] < widths[1]
    own = np.unique(tokens[tokens < min(widths)]).tolist()
    either = list(range(min(widths))) if ids is None else sorted({*ids, *own})
    p, q = (
        probabilities(model(mx.array(np.minimum(tokens[:, :-1], width - 1)))[..., mx.array(either)])
        for model, width in zip((leader, draft), widths, strict=True)
    )
    if ids is not None:
        for model in (leader, draft):
            heads.cut(model, ids)
    batch = TextBatch(tokens, mx.array(np.ones((2, 11), dtype=np.float32)))
    loss = Distillation(leader, mx.float32)(draft, batch)
    assert loss.item() == pytest.approx(float(np.sum(p * np.log(p / q), axis=-1).mean()), rel=1e-3)
