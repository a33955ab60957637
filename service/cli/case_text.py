"""Recorded tokens as text; for failure cases, the draft's proposal and the target's token in context."""

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
"""Tokens shown before and after a case."""


@dataclass(frozen=True, slots=True)
class CaseText:
    """A case's text. Invalid UTF-8, such as parts of characters, is shown as escapes."""

    before: str
    drafted: str
    target: str
    after: str


class TextReader:
    """Decodes tokens with the target's tokenizer. Downloads nothing: raises RedraftError if the model is not on disk."""

    def __init__(self, settings: Settings) -> None:
        from mlx_lm.utils import load_tokenizer

        from service.models.fingerprint import tokenizer_fingerprint
        from service.models.text import TextEncoder

        name = settings.models.target
        folder = target_at_hand(settings)
        if folder is None:
            raise RedraftError(
                f"the tokenizer of {name} is not on this disk: download it with `redraft models get {name}`"
            )
        self._fingerprint = tokenizer_fingerprint(folder)
        self._encoder: TextEncoder = TextEncoder(load_tokenizer(folder))

    def text(self, tokens: Sequence[int], tokenizer: str) -> str | None:
        """The text, with invalid UTF-8 as escapes. None if the tokens belong to another tokenizer."""
        return self._text(tokens) if tokenizer == self._fingerprint else None

    def read(self, case: FailureCase, context: CaseContext) -> CaseText | None:
        """The case as text; None if its tokens belong to another tokenizer."""
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
