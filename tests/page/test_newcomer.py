"""A newcomer's path holds its times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.page.newcomer import walk
from tests.support.browser import CHROMIUM


@pytest.mark.bench
@pytest.mark.timeout(2400)
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian: apt install chromium)")
def test_a_newcomer_has_a_token_within_a_minute_and_sees_the_swap_within_two_seconds(
    tmp_path: Path, figure: Callable[[str], None]
) -> None:
    walked = walk(tmp_path)
    figure(f"first token {walked.first_token:.1f} s after `serve`, the swap on the page {walked.swap:.2f} s after it")
    assert walked.first_token <= 60
    assert walked.swap <= 2
    assert walked.text
    assert len(list(tmp_path.glob("page-*.png"))) == 6
