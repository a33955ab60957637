"""The models of tests that need any target, and a draft that is mostly right."""

import mlx.nn as nn
import pytest
from mlx_lm.models.llama import Model

from tests.support.oracle import noisy_copy, tiny_llama


@pytest.fixture(scope="module")
def target() -> Model:
    return tiny_llama(0)


@pytest.fixture(scope="module")
def draft(target: Model) -> nn.Module:
    return noisy_copy(target, 1, 0.1)
