"""A real panic of a real Rust library."""

from typing import Any, NoReturn, cast

from llguidance import LLTokenizer


class _Failing:
    """A vocabulary of two letters for llguidance, whose tokenizer fails: llguidance panics where it is called."""

    is_tokenizer_wrapper = True
    eos_token_id, bos_token_id = 0, None
    special_token_ids = (0,)
    tokens = (b"<end>", b"a", b"b")

    def __call__(self, text: str) -> list[int]:
        raise ValueError(text)


def panicking_tokenizer() -> LLTokenizer:
    """A tokenizer that panics on every text."""
    return LLTokenizer(cast("Any", _Failing()), eos_token=0)


def panic(text: str = "ab") -> NoReturn:
    panicking_tokenizer().tokenize_str(text)
    raise AssertionError("it did not panic")
