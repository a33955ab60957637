"""The reduced vocabulary: the ids that a draft may propose."""

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from service.core import ModelError
from service.models import vocabulary
from service.models.fingerprint import folder_sha256


def test_a_written_vocabulary_is_read_in_order(tmp_path: Path) -> None:
    assert vocabulary.read(tmp_path) is None
    vocabulary.write([9, 2, 70000, 0], tmp_path)
    assert vocabulary.read(tmp_path) == [9, 2, 70000, 0]
    before = folder_sha256(tmp_path)
    vocabulary.write([2, 9, 70000, 0], tmp_path)
    assert folder_sha256(tmp_path) != before


@pytest.mark.parametrize(
    "arrays",
    [
        {"other": mx.array([1], dtype=mx.uint32)},
        {"ids": mx.array([1.0])},
        {"ids": mx.array([1, 1], dtype=mx.uint32)},
        {"ids": mx.array([[1]], dtype=mx.uint32)},
        {"ids": mx.array([-1])},
    ],
)
def test_a_damaged_list_is_refused(tmp_path: Path, arrays: dict[str, mx.array]) -> None:
    mx.save_safetensors(str(tmp_path / vocabulary.FILE), arrays)
    with pytest.raises(ModelError, match=r"vocabulary\.safetensors"):
        vocabulary.read(tmp_path)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / vocabulary.FILE).write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="cannot be read"):
        vocabulary.read(tmp_path)


def test_ranked_by_frequency_then_by_id() -> None:
    assert vocabulary.ranked([[5, 5, 3], [3, 5]], always=[7, 1], width=8) == [7, 1, 5, 3, 0, 2, 4, 6]


def test_a_vocabulary_is_adapted_to_the_log_at_the_same_size() -> None:
    found = vocabulary.adapted([0, 1, 2, 3, 4], [[9, 9, 3], [8]], always=[1])
    assert found == [1, 9, 3, 8, 0]
    assert vocabulary.adapted([4, 2], [], always=[2]) == [2, 4]


def test_extra_ids_are_a_rows_latest_distinct_ids_outside_the_vocabulary() -> None:
    in_vocabulary = np.zeros(2000, dtype=np.bool_)
    in_vocabulary[[4, 6]] = True
    found = vocabulary.extra_ids([[9, 4, 8, 9, 6, 7], [4, 6], list(range(1000, 2000))], in_vocabulary)
    assert found.shape == (3, vocabulary.MAX_EXTRA_IDS)
    assert found[0, :3].tolist() == [7, 9, 8] and set(found[0, 3:].tolist()) == {4}
    assert set(found[1].tolist()) == {4}
    assert found[2].tolist() == list(range(1999, 1999 - vocabulary.MAX_EXTRA_IDS, -1))


def test_rows_without_extra_ids_are_still_an_array() -> None:
    assert vocabulary.extra_ids([[0, 1]], np.ones(3, dtype=np.bool_)).tolist() == [[0] * 64]


def test_extra_ids_come_in_few_widths() -> None:
    """Calls of the same shape come again while a text grows."""
    kept = np.arange(3000) < 4
    widths = {vocabulary.extra_ids([range(5, 6 + count), [7]], kept).shape[1] for count in range(0, 700, 9)}
    assert widths == {64, 128, 256, 512}


def test_extra_ids_follow_a_text_as_it_grows() -> None:
    in_vocabulary, random = np.arange(3000) < 400, np.random.default_rng(0)
    text: list[int] = random.integers(0, 3000, 900).tolist()
    growing = text[:10]
    extra = vocabulary.ExtraIds(growing, in_vocabulary)
    while len(growing) < len(text):
        assert [extra.update()] == [
            [n for n in row if n >= 400] for row in vocabulary.extra_ids([growing], in_vocabulary).tolist()
        ]
        growing += text[len(growing) : len(growing) + int(random.integers(1, 60))]
    latest = list(dict.fromkeys(token for token in reversed(text) if token >= 400))
    assert extra.update() == latest[: vocabulary.MAX_EXTRA_IDS]
