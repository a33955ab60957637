"""Guards of the training loop, on models small enough to check every step."""

import math
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import psutil
import pytest

from service.core import Progress, TrainingFailed
from service.learning import lora
from service.learning.batches import Batch, batches, collate
from service.learning.examples import build
from service.learning.losses import TargetDivergence
from service.learning.train import Optimiser, TrainReport, global_norm, number, train, update_count
from tests.support.logged_texts import VOCABULARY, random_texts, with_targets
from tests.support.oracle import noisy_copy, tiny_llama
from tests.support.typed import leaves


@dataclass(frozen=True)
class Points:
    """Rows of a linear regression. scale multiplies the loss."""

    x: mx.array
    y: mx.array
    scale: float = 1.0

    @property
    def count(self) -> int:
        return self.x.shape[0]

    @property
    def rows(self) -> int:
        return self.count

    @property
    def loss_weight(self) -> float:
        return float(self.count)

    def split(self, rows: int) -> list["Points"]:
        parts = range(0, self.rows, rows)
        return [Points(self.x[at : at + rows], self.y[at : at + rows], self.scale) for at in parts]


def squared(model: nn.Module, points: Points) -> mx.array:
    if not points.x.size:
        return mx.array(0.0)
    return points.scale * mx.square(model(points.x) - points.y).mean()


def points(seed: int, rows: int = 4, scale: float = 1.0) -> Points:
    key = mx.random.key(seed)
    x = mx.random.normal((rows, 3), key=key)
    return Points(x, x @ mx.array([[1.0], [-2.0], [0.5]]), scale)


NAN = Points(mx.full((4, 3), float("nan")), mx.zeros((4, 1)))
EMPTY = Points(mx.zeros((0, 3)), mx.zeros((0, 1)))


def line(seed: int = 0) -> nn.Linear:
    model = nn.Linear(3, 1)
    model.weight = mx.random.normal((1, 3), key=mx.random.key(seed))
    model.bias = mx.zeros((1,))
    return model


def fit(model: nn.Module, data: list[Points], **settings: Any) -> TrainReport:
    defaults: dict[str, Any] = {"learning_rate": 0.05, "steps": len(data), "warmup": 0.0}
    return train(model, data, loss_fn=squared, optimiser=Optimiser(**(defaults | settings)))


def weights(model: nn.Module) -> dict[str, mx.array]:
    return dict(leaves(model.parameters()))


def same(one: nn.Module, other: nn.Module, tolerance: float = 1e-6) -> bool:
    ours, theirs = weights(one), weights(other)
    return all(mx.allclose(ours[name], theirs[name], rtol=0, atol=tolerance).item() for name in ours)


def test_the_loss_falls_on_a_fixed_batch() -> None:
    texts = with_targets(tiny_llama(1), random_texts(4, seed=2))
    batch = collate(build(texts, max_length=128, vocabulary=VOCABULARY).examples)
    model = tiny_llama(2)
    lora.wrap(model, rank=8, scale=2.0, seed=0)
    report = train(
        model, [batch] * 40, loss_fn=TargetDivergence(model), optimiser=Optimiser(learning_rate=1e-2, steps=40)
    )
    assert report.steps == 40
    assert report.loss < 0.6 * report.losses[0]
    assert report.tokens == 40 * batch.count


def test_every_lora_b_has_a_gradient_after_the_first_step() -> None:
    texts = with_targets(tiny_llama(1), random_texts(4, seed=2))
    batch = collate(build(texts, max_length=128, vocabulary=VOCABULARY).examples)
    model = tiny_llama(2)
    lora.wrap(model, rank=4, scale=2.0, seed=0)
    loss = TargetDivergence(model)
    before = dict(leaves(model.trainable_parameters()))
    train(model, [batch], loss_fn=loss, optimiser=Optimiser(learning_rate=1e-3, steps=1, warmup=0.0))
    gradients = dict(leaves(nn.value_and_grad(model, loss)(model, batch)[1]))
    after = dict(leaves(model.trainable_parameters()))
    names = [name for name in gradients if name.endswith("lora_b")]
    assert len(names) == 2 * 7
    for name in names:
        assert number(mx.abs(gradients[name]).max()) > 0, name
        assert not mx.array_equal(before[name], after[name]).item(), name


def test_only_trainable_parameters_change_and_only_they_are_in_the_optimiser(monkeypatch: pytest.MonkeyPatch) -> None:
    from service.learning import train as training

    seen: list[object] = []

    class Spy(training.AdamW):
        def init(self, parameters: dict[str, object]) -> None:
            seen.extend(name for name, _ in leaves(parameters))
            super().init(parameters)

    monkeypatch.setattr(training, "AdamW", Spy)
    model = line()
    model.freeze(keys="bias")
    before = weights(model)
    fit(model, [points(1)] * 5)
    assert seen == ["weight"]
    assert mx.array_equal(weights(model)["bias"], before["bias"]).item()
    assert not mx.array_equal(weights(model)["weight"], before["weight"]).item()


@pytest.mark.parametrize("bad", [NAN, Points(mx.full((4, 3), 3e38), mx.zeros((4, 1)))])
@pytest.mark.promise(17)
def test_a_bad_batch_is_skipped_and_counted_without_effect(bad: Points) -> None:
    good = [points(i) for i in range(12)]
    clean, guarded = line(), line()
    # The same updates at the same rates, but for the bad one's own turn.
    report = fit(guarded, [*good, bad], steps=100)
    expected = fit(clean, good, steps=100)
    assert (report.skipped, expected.skipped) == (1, 0)
    assert same(clean, guarded)
    assert report.losses == expected.losses


def test_an_infinite_gradient_of_a_finite_loss_is_skipped() -> None:
    def root(model: nn.Module, batch: Points) -> mx.array:
        return mx.sqrt(mx.square(model(batch.x) * batch.scale).sum())

    model, before = line(), line()
    data = [*[points(i) for i in range(5)], points(9, scale=0.0)]
    assert math.isfinite(number(root(model, data[-1])))
    report = train(model, data, loss_fn=root, optimiser=Optimiser(learning_rate=1e-3, steps=6))
    assert report.skipped == 1
    assert not same(model, before)
    assert all(mx.isfinite(array).all().item() for array in weights(model).values())


@pytest.mark.promise(17)
def test_too_many_bad_batches_fail_the_run_with_the_reason() -> None:
    good = [points(i) for i in range(20)]
    assert fit(line(), [*good, NAN, NAN]).skipped == 2
    with pytest.raises(TrainingFailed, match=r"3 of 23 steps had NaN"):
        fit(line(), [*good, NAN, NAN, NAN])
    with pytest.raises(TrainingFailed, match="NaN"):
        fit(line(), [NAN] * 10)


@pytest.mark.promise(17)
def test_non_finite_weights_fail_the_run() -> None:
    model = line()
    model.bias = mx.full((1,), float("nan"))
    model.freeze()
    model.unfreeze(keys="bias")

    def ignoring(model: nn.Module, batch: Points) -> mx.array:
        return mx.square(mx.nan_to_num(model["bias"]) - 1.0).sum() + 0 * batch.y.sum()

    with pytest.raises(TrainingFailed):
        train(model, [points(1)] * 3, loss_fn=ignoring, optimiser=Optimiser(learning_rate=0.1, steps=3))


@pytest.mark.promise(17)
def test_a_learning_rate_a_million_times_too_high_fails_the_run() -> None:
    target = tiny_llama(1, sharpness=40.0)
    texts = with_targets(target, random_texts(24, seed=2))
    examples = build(texts, max_length=64, vocabulary=VOCABULARY).examples
    model = noisy_copy(target, 3, 0.05)
    lora.wrap(model, rank=8, scale=2.0, seed=0)
    data: list[Batch] = [batch for epoch in range(6) for batch in batches(examples, 4, epoch)]
    loss = TargetDivergence(model)
    checks = collate(examples[:8])
    with pytest.raises(TrainingFailed, match="validation loss rose from"):
        train(
            model,
            data,
            loss_fn=loss,
            optimiser=Optimiser(learning_rate=1e3, steps=len(data)),
            validate=lambda: number(loss(model, checks)),
        )


def together(*parts: Points) -> Points:
    return Points(mx.concatenate([p.x for p in parts]), mx.concatenate([p.y for p in parts]))


def test_accumulated_steps_equal_one_large_batch() -> None:
    data = [points(i) for i in range(6)]
    one, other = line(), line()
    # Two updates: the second one's size depends on how large the first gradient was.
    report = fit(one, data, accumulate=3, steps=2, clip=1e9)
    fit(other, [together(*data[:3]), together(*data[3:])], steps=2, clip=1e9)
    assert report.steps == 2
    assert same(one, other)
    for count in (1, 3):
        report = fit(line(), data[:count], accumulate=3, steps=1, clip=1e-3)
        model = line()
        _, gradients = nn.value_and_grad(model, squared)(model, together(*data[:count]))
        assert report.grad_norm == pytest.approx(number(global_norm(gradients)), rel=1e-5)


def test_accumulation_averages_over_valid_steps_only() -> None:
    good = [points(1), points(2), points(3)]
    one, other = line(), line()
    expected = fit(one, good, steps=50)
    report = fit(other, [good[0], NAN, good[1], EMPTY, EMPTY, good[2]], accumulate=2, steps=50)
    assert report.steps == 3
    assert (report.skipped, report.empty) == (1, 2)
    assert report.losses == pytest.approx(expected.losses)
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert same(one, other)


def test_the_remainder_of_an_epoch_is_applied() -> None:
    epoch = [points(i) for i in range(5)]
    steps = update_count(5, 2, 2)
    assert steps == 6
    report = fit(line(), [*epoch, *epoch], accumulate=2, epoch=5, steps=steps)
    assert report.steps == len(report.losses) == steps
    one, other = line(), line()
    fit(one, epoch[:3], accumulate=2, steps=2)
    fit(other, epoch[:2], accumulate=2, steps=2)
    assert not same(one, other)


@pytest.mark.promise(17)
def test_no_trainable_example_fails_the_run() -> None:
    with pytest.raises(TrainingFailed, match="4 empty"):
        fit(line(), [EMPTY] * 4)
    with pytest.raises(TrainingFailed, match="nothing to learn"):
        fit(line(), [])


def test_a_huge_gradient_is_clipped_to_the_same_length_as_a_large_one() -> None:
    one, other, unclipped = line(), line(), line()
    huge, large, normal = points(1, scale=1e6), points(1, scale=1e2), points(2, scale=1e2)
    fit(one, [huge, normal], clip=1.0, steps=9)
    fit(other, [large, normal], clip=1.0, steps=9)
    fit(unclipped, [huge, normal], clip=1e9, steps=9)
    assert same(one, other, 1e-5)
    assert not same(one, unclipped, 1e-3)


def test_the_learning_rate_warms_up_and_decays_to_zero() -> None:
    optimiser = Optimiser(learning_rate=2.0, steps=100, warmup=0.1)
    rates = [optimiser.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([2.0 * (i + 1) / 10 for i in range(10)])
    assert max(rates) == 2.0
    assert all(later < earlier for earlier, later in pairwise(rates[10:]))
    assert 0 < rates[-1] < 0.01
    assert Optimiser(learning_rate=2.0, steps=4, warmup=0.0).rate(0) == 2.0


def test_every_update_is_reported() -> None:
    seen: list[Progress] = []
    data = [points(i) for i in range(7)]
    report = train(
        line(),
        data,
        loss_fn=squared,
        optimiser=Optimiser(learning_rate=0.01, steps=4, accumulate=2),
        on_progress=seen.append,
    )
    assert [p.step for p in seen] == [1, 2, 3, 4]
    assert {p.steps for p in seen} == {4}
    assert [p.loss for p in seen] == list(report.losses)
    assert all(p.grad_norm is not None and p.grad_norm > 0 for p in seen)
    assert all(p.tokens_per_second is not None and p.tokens_per_second > 0 for p in seen)
    left = [p.seconds_left for p in seen]
    assert left[-1] == 0
    assert all(one is not None and one > 0 for one in left[:-1])


def test_time_that_training_waits_is_no_part_of_the_run() -> None:
    asked_at_step: list[int] = []
    seen, started_at = list[Progress](), time.perf_counter()

    def hold() -> float:
        asked_at_step.append(len(seen))
        time.sleep(0.2)
        return 0.2

    report = train(
        line(),
        [points(1), points(2), points(3)],
        loss_fn=squared,
        optimiser=Optimiser(learning_rate=0.01, steps=3),
        on_progress=seen.append,
        hold=hold,
    )
    assert asked_at_step == [0, 1, 2]
    assert report.seconds <= time.perf_counter() - started_at - 3 * 0.2


def test_the_weights_of_the_best_validation_are_restored() -> None:
    model = line()
    answers = iter([2.5, 3.0, 1.0, 2.0])
    at: list[dict[str, mx.array]] = []

    def validate() -> float:
        at.append(weights(model))
        return next(answers)

    report = train(
        model,
        [points(i) for i in range(6)],
        loss_fn=squared,
        optimiser=Optimiser(learning_rate=0.05, steps=6),
        validate=validate,
        validate_every=2,
    )
    assert report.validations == ((0, 2.5), (2, 3.0), (4, 1.0), (6, 2.0))
    assert report.best_step == 4
    assert all(mx.array_equal(weights(model)[name], at[2][name]).item() for name in at[2])
    assert not mx.array_equal(at[2]["weight"], at[3]["weight"]).item()


def test_the_model_is_left_ready_to_serve() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = line()
            self.dropout = nn.Dropout(0.5)

        def __call__(self, x: mx.array) -> mx.array:
            return self.inner(self.dropout(x))

    model = Dropping()
    fit(model, [points(1)] * 2)
    assert not model.training
    with pytest.raises(TrainingFailed):
        fit(model, [NAN] * 5)
    assert not model.training


def resident() -> int:
    return psutil.Process().memory_info().rss


def growth(each: Callable[[], None]) -> int:
    """Resident bytes added by 40 training steps after 20 others."""
    texts = with_targets(tiny_llama(1), random_texts(9, seed=2))
    examples = build(texts, max_length=96, vocabulary=VOCABULARY).examples
    model = tiny_llama(2, hidden=64)
    lora.wrap(model, rank=8, scale=2.0, seed=0)
    sizes: list[int] = []

    def on_progress(progress: Progress) -> None:
        each()
        sizes.append(resident())

    data = [batch for epoch in range(20) for batch in batches(examples, 3, epoch)]
    optimiser = Optimiser(learning_rate=1e-3, steps=len(data))
    train(model, data, loss_fn=TargetDivergence(model), optimiser=optimiser, on_progress=on_progress)
    return sizes[-1] - sizes[len(sizes) // 3]


@pytest.mark.nightly
def test_memory_stays_flat() -> None:
    leaked: list[mmap.mmap] = []

    def leak() -> None:
        # Pages of its own: an ordinary allocation may be served from memory that earlier tests gave back.
        leaked.append(mmap.mmap(-1, 2**19))
        leaked[-1].write(b"x" * 2**19)

    assert growth(lambda: None) < 8 * 2**20
    # The measure itself: a planted leak of half a megabyte a step does not pass.
    assert growth(leak) > 8 * 2**20


def out_of_memory_above(rows: int, seen: list[int]) -> Callable[[nn.Module, Points], mx.array]:
    """The loss of a device that has room for so many rows. seen: the rows of each call."""

    def loss(model: nn.Module, points: Points) -> mx.array:
        seen.append(points.rows)
        if points.rows > rows:
            raise RuntimeError("[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum")
        return squared(model, points)

    return loss


@pytest.mark.parametrize(("room", "tried"), [(8, [8, 8]), (4, [8, 4, 4, 4, 4]), (2, [8, 4, *[2] * 8])])
def test_a_run_out_of_memory_goes_on_with_smaller_micro_batches(room: int, tried: list[int]) -> None:
    data, seen = [points(1, rows=8), points(2, rows=8)], list[int]()
    one, other = line(), line()
    expected = fit(one, data)
    report = train(
        other,
        data,
        loss_fn=out_of_memory_above(room, seen),
        optimiser=Optimiser(learning_rate=0.05, steps=2, warmup=0.0),
    )
    assert seen == tried
    assert report.losses == pytest.approx(expected.losses) and report.skipped == 0
    assert same(one, other)


@pytest.mark.parametrize(("rows", "tried"), [(8, [8, 4, 2]), (2, [2, 1]), (1, [1])])
def test_memory_that_does_not_do_for_less_either_ends_the_run(rows: int, tried: list[int]) -> None:
    seen: list[int] = []
    with pytest.raises(RuntimeError, match="malloc"):
        train(
            line(),
            [points(1, rows=rows)],
            loss_fn=out_of_memory_above(0, seen),
            optimiser=Optimiser(learning_rate=0.05, steps=1),
        )
    assert seen == tried


def test_another_error_is_not_tried_again() -> None:
    seen: list[int] = []

    def broken(model: nn.Module, points: Points) -> mx.array:
        seen.append(points.rows)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        train(line(), [points(1)], loss_fn=broken, optimiser=Optimiser(learning_rate=0.05, steps=1))
    assert seen == [4]


def test_batches_of_unlike_weight_count_by_it() -> None:
    data = [points(1, rows=2), points(2, rows=6)]
    one, other = line(), line()
    fit(one, [together(*data)], steps=1, clip=1e9)
    report = fit(other, data, accumulate=2, steps=1, clip=1e9)
    assert same(one, other)
    model = line()
    _, gradients = nn.value_and_grad(model, squared)(model, together(*data))
    assert report.grad_norm == pytest.approx(number(global_norm(gradients)), rel=1e-5)


def test_every_micro_batch_can_be_paused_and_one_with_nan_spoils_its_batch_alone() -> None:
    held: list[float] = []

    def hold() -> float:
        held.append(0.0)
        return 0.0

    spoilt = together(points(1, rows=2), Points(mx.full((2, 3), float("nan")), mx.zeros((2, 1))))
    report = train(
        line(),
        [spoilt, points(2), points(3)],
        loss_fn=squared,
        optimiser=Optimiser(learning_rate=0.05, steps=99),
        hold=hold,
        rows=2,
    )
    assert len(held) == 6 and report.skipped == 1 and len(report.losses) == 2
