"""Thousands of requests made from the OpenAPI document; `just clients` makes 100 of each operation."""

from collections.abc import Callable

import pytest

from tests.clients.__main__ import SCHEMATHESIS, main


@pytest.mark.nightly
@pytest.mark.timeout(10_800)
@pytest.mark.promise(25)
def test_every_answer_to_5000_requests_of_each_operation_is_as_documented(figure: Callable[[str], None]) -> None:
    assert main([SCHEMATHESIS], examples=5000) == 0
    figure("5,000 requests made up for each operation, every answer as documented")
