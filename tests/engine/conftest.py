"""Set-up of the engine's tests."""

from collections.abc import Iterator

import pytest

from service.engine import profile


@pytest.fixture(scope="module", autouse=True)
def brief_costs() -> Iterator[None]:
    """What calls cost is timed for a moment only: a decoder that chooses its draft length does so before its first round, and
    calls of the tests' models take a millisecond."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profile, "SPENT", 0.02)
        patch.setattr(profile, "SPENT_ASKING", 0.05)
        yield
