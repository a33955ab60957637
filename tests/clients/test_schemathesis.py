"""Hundreds of requests made from the OpenAPI document; `just clients` makes fewer."""

import pytest

from tests.clients.__main__ import SCHEMATHESIS, main


@pytest.mark.nightly
def test_every_answer_to_500_requests_of_each_operation_is_as_documented() -> None:
    assert main([SCHEMATHESIS], examples=500) == 0
