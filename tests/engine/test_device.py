"""What the host reads of the device."""

import mlx.core as mx
import numpy as np
import pytest

from service.engine import device


def test_arrays_are_read_together_as_they_are() -> None:
    given = [
        mx.array([[1, -2], [3, 2**31 - 1]], dtype=mx.int32),
        mx.array([[True, False, True]]),
        mx.array([0, 2**32 - 1], dtype=mx.uint32),
        mx.array([[[0.1], [-float("inf")], [float("nan")]]], dtype=mx.float32),
        mx.array([5, 6], dtype=mx.int64),
        mx.zeros((0, 3), dtype=mx.float32),
        mx.arange(12, dtype=mx.int32).reshape(3, 4).T,
    ]
    packed = device.pack(given)
    with device.counting() as counts:
        device.launch(packed)
        found = device.read_packed(packed, given)
    assert (counts.launches, counts.waits) == (1, 1)
    for one, other in zip(found, given, strict=True):
        np.testing.assert_array_equal(one, np.array(other))
        assert one.dtype.kind == np.array(other).dtype.kind


@pytest.mark.parametrize(("own", "held"), [(None, 4), (80, 10), (24, 4)], ids=["no CUDA", "large", "small"])
def test_what_may_be_held_for_reuse(monkeypatch: pytest.MonkeyPatch, own: int | None, held: int) -> None:
    """In GiB, on a host with enough of it."""
    limits: list[int] = []
    monkeypatch.setattr(mx, "device_info", lambda: {} if own is None else {"total_memory": own * 2**30})
    monkeypatch.setattr(mx, "set_cache_limit", limits.append)
    monkeypatch.setattr(device, "total_bytes", lambda: 2**40)
    device.limit_cache()
    assert limits == [held * 2**30]
