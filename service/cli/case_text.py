"""Recorded tokens as text; of failure cases what the draft proposed and what the target said instead, with a bit of what is
around them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from service.cli.models import target_at_hand
from service.core import FailureCase, RedraftError
from service.settings import Settings

if TYPE_CHECKING:
    from service.models.text import TextEncoder
    from service.store.log.cases import CaseContext

BEFORE, AFTER = 16, 8
"""Tokens around a case."""


@dataclass(frozen=True, slots=True)
class CaseText:
    """Bytes that are no UTF-8, as parts of characters are, are escapes in it."""

    before: str
    drafted: str
    target: str
    after: str


class TextReader:
    """Decodes tokens by the target's tokenizer. Fetches no model: raises RedraftError where it is not on this disk."""

    def __init__(self, settings: Settings) -> None:
        from mlx_lm.utils import load_tokenizer

        from service.models.fingerprint import tokenizer_fingerprint
        from service.models.text import TextEncoder

        name = settings.models.target
        folder = target_at_hand(settings)
        if folder is None:
            raise RedraftError(f"the tokenizer of {name} is not on this disk: `redraft models get {name}` fetches it")
        self._fingerprint = tokenizer_fingerprint(folder)
        self._encoder: TextEncoder = TextEncoder(load_tokenizer(folder))

    def text(self, tokens: Sequence[int], tokenizer: str) -> str | None:
        """Bytes that are no UTF-8 are escapes in it. None where the tokens are another tokenizer's."""
        return self._text(tokens) if tokenizer == self._fingerprint else None

    def read(self, case: FailureCase, context: CaseContext) -> CaseText | None:
        """The case as text; None where its tokens are another tokenizer's."""
        if context.tokenizer != self._fingerprint:
            return None
        return CaseText(
            self._text(context.before),
            self._text((case.drafted,)),
            self._text((case.target,)),
            self._text(context.after),
        )

    def _text(self, tokens: Sequence[int]) -> str:
        return b"".join(map(self._encoder.token_bytes, tokens)).decode("utf-8", "backslashreplace")
