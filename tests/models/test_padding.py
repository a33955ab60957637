"""Which texts share a call, and how they are padded."""

from __future__ import annotations

import numpy as np
import pytest

from service.models import padding
from service.models.padding import grouped, padded, padded_rows


def test_lengths_are_rounded_up() -> None:
    assert [padded(length) for length in (0, 1, 31, 32, 33, 64)] == [0, 32, 32, 32, 64, 64]


def test_rows_are_as_long_as_the_longest_with_zeros_behind() -> None:
    rows = padded_rows([np.array(ids, dtype=np.int32) for ids in ([7, 8], list(range(1, 34)))])
    assert (rows.shape, rows.dtype) == ((2, 64), np.dtype(np.int32))
    assert [row[row > 0].tolist() for row in rows] == [[7, 8], list(range(1, 34))]
    assert rows[0, :2].tolist() == [7, 8]


def test_a_call_takes_what_fits_padded_shorter_texts_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding, "TOKENS", 128)
    # Four of 32 are 128; two of 64 are; one of 300 is a call of its own. Equal ones keep their order.
    lengths = {9: 300, 4: 40, 3: 20, 8: 5, 2: 20, 0: 33, 1: 32, 7: 64}
    assert list(grouped(lengths)) == [[8, 3, 2, 1], [0, 4], [7], [9]]
    assert list(grouped({6: 32, 5: 33})) == [[6, 5]]
    assert list(grouped({})) == []
