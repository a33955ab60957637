"""The bytes of every id of a vocabulary, and streaming text from tokens."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, cast
from weakref import WeakKeyDictionary

from mlx_lm.tokenizer_utils import StreamingDetokenizer, TokenizerWrapper
from tokenizers.decoders import Decoder
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer
from transformers import AddedToken
from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTE_FALLBACK = re.compile("<0x[0-9A-Fa-f]{2}>")
"""How SentencePiece vocabularies write a single byte."""
NAMED = re.compile(r"<[^<>\s]+>")
"""Names of added tokens that grammars treat as special regardless of their flag, which is llguidance's rule: Qwen's
`<tool_call>` and `<think>` lack the flag. Runs of spaces, which other vocabularies add, are text."""


class TokenTable:
    """The tokens of a tokenizer by id.

    Ids may have gaps, and a model's logits may be wider than the vocabulary. An id without a token has no bytes.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        vocabulary = cast("Mapping[str, int]", tokenizer.get_vocab())
        added = cast("Mapping[str, int]", tokenizer.get_added_vocab())
        self.bytes: list[bytes] = [b""] * (max(vocabulary.values(), default=-1) + 1)
        """By id; the largest id plus one entries."""
        spelling = spelling_of(tokenizer, vocabulary.keys() - added.keys())
        self.joins = spelling is not None
        """Whether the concatenated bytes of an answer's tokens are its text."""
        convert = _byte_level_bytes if spelling is Spelling.BYTE_LEVEL else _sentence_piece_bytes
        for id, text in zip(vocabulary.values(), convert(vocabulary) if vocabulary else (), strict=True):
            self.bytes[id] = text
        for name, id in added.items():
            self.bytes[id] = name.encode()
        decoder = cast("Mapping[int, AddedToken]", tokenizer.added_tokens_decoder)
        markers = {tokenizer.tool_call_start, tokenizer.tool_call_end, tokenizer.think_start, tokenizer.think_end}
        self.special: dict[str, int] = {
            token.content: id
            for id, token in decoder.items()
            if token.special or token.content in markers or NAMED.fullmatch(token.content)
        }
        """The tokens that are not text in a grammar, by name. A grammar allows them only where it names them."""
        flagged = {id for id, token in decoder.items() if token.special}
        self.flagged = frozenset(flagged | set(cast("Sequence[int]", tokenizer.all_special_ids)))
        """Ids of the tokens that the tokenizer itself declares special."""

    def __len__(self) -> int:
        return len(self.bytes)

    def __getitem__(self, token: int) -> bytes:
        """The bytes of a token, not always whole characters."""
        return self.bytes[token] if token < len(self.bytes) else b""


_tables: WeakKeyDictionary[TokenizerWrapper, TokenTable] = WeakKeyDictionary()


def token_table(tokenizer: TokenizerWrapper) -> TokenTable:
    """The tokenizer's table, built on the first call."""
    if (known := _tables.get(tokenizer)) is None:
        known = _tables[tokenizer] = TokenTable(tokenizer)
    return known


def steps(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The parts of a normalizer, a pre-tokenizer or a decoder of tokenizer.json, with sequences flattened."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
    for part in step.get("normalizers", step.get("pretokenizers", step.get("decoders", ()))):
        yield from steps(part)


def part_steps(part: Normalizer | PreTokenizer | Decoder | None) -> Iterator[dict[str, Any]]:
    """The same for such a part of a tokenizer object, without the vocabulary, which is slow to write as JSON."""
    return steps(json.loads(part.__getstate__()) if part is not None else None)


class Spelling(Enum):
    """How a vocabulary writes the bytes of its pieces. BYTE_LEVEL: each byte as one letter, as in GPT-2. SENTENCE_PIECE: as
    text, with U+2581 for a space and `<0x0A>` for a single byte."""

    BYTE_LEVEL = "byte-level"
    SENTENCE_PIECE = "SentencePiece"


def spelling_of(tokenizer: TokenizerWrapper, pieces: Collection[str]) -> Spelling | None:
    """The spelling of a vocabulary's pieces; None if only the tokenizer's decoder can turn them into text.

    The pieces themselves determine it, by how they write a space, because some tokenizer.json files name a decoder or a
    pre-tokenizer of the other spelling. If the pieces are undecided, these parts decide.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    decoding = list(part_steps(backend.decoder))
    if not all(_is_known(step) for step in decoding):
        return None
    letters, low_lines = (sum(piece.startswith(space) for piece in pieces) for space in (_SPACE_LETTER, _LOW_LINE))
    parts = {step["type"] for step in (*decoding, *part_steps(backend.pre_tokenizer))}
    if letters > low_lines or (letters == low_lines and "ByteLevel" in parts):
        return Spelling.BYTE_LEVEL
    if low_lines > letters or not parts.isdisjoint({"Metaspace", "ByteFallback"}):
        return Spelling.SENTENCE_PIECE
    return None


def _is_known(step: Mapping[str, Any]) -> bool:
    """Whether a decoder step belongs to one of the spellings. Such steps drop spaces at the beginning of a text, which an
    answer is not."""
    if step["type"] == "Replace":
        return (step["pattern"], step["content"]) == ({"String": _LOW_LINE}, " ")
    return step["type"] in {"ByteLevel", "ByteFallback", "Fuse", "Strip", "Metaspace"}


_SPACE_LETTER, _LOW_LINE = "\u0120", "\u2581"


# All pieces are converted as one text, because converting 150,000 texts separately takes several times as long.


def _byte_level_bytes(pieces: Collection[str]) -> list[bytes]:
    """The bytes of each piece in byte-level spelling. A piece with other letters stands for its UTF-8."""
    joined, separator = _joined(pieces)
    letters = _Letters(
        {ord(letter): chr(byte) for byte, letter in bytes_to_unicode().items()} | {ord(separator): separator}
    )
    texts = joined.translate(letters).split(separator)
    return [
        piece.encode() if _OTHER in text else text.encode("latin-1") for piece, text in zip(pieces, texts, strict=True)
    ]


class _Letters(dict[int, str]):
    def __missing__(self, letter: int) -> str:
        return _OTHER


_OTHER = "\u0100"
"""A letter that represents no byte."""


def _sentence_piece_bytes(pieces: Collection[str]) -> list[bytes]:
    """The bytes of each piece if U+2581 stands for a space and `<0x0A>` for a byte."""
    joined, separator = _joined(pieces)
    texts = joined.replace(_LOW_LINE, " ").encode().split(separator.encode())
    return [
        bytes([int(piece[3:5], 16)]) if piece.startswith("<0x") and BYTE_FALLBACK.fullmatch(piece) else text
        for piece, text in zip(pieces, texts, strict=True)
    ]


def _joined(pieces: Collection[str]) -> tuple[str, str]:
    """All pieces as one text, and a separator that occurs in none of them."""
    for separator in map(chr, range(sys.maxunicode, 0, -1)):
        joined = separator.join(pieces)
        if joined.count(separator) == len(pieces) - 1:
            return joined, separator
    raise ValueError("a vocabulary has all characters of Unicode")


class TableDetokenizer:
    """A streaming detokenizer over a token table."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._pending = b""
        """Bytes that do not form a whole character yet."""
        self.text = ""

    def add_token(self, token: int) -> None:
        """Append a token. A token without bytes adds nothing."""
        self._pending += self._table[token]
        text = self._pending.decode("utf-8", "replace")
        if not text.endswith("\ufffd"):
            self._append(text)

    def finalize(self) -> None:
        """Add incomplete characters to `text`, as U+FFFD. No token may follow."""
        self._append(self._pending.decode("utf-8", "replace"))

    def _append(self, text: str) -> None:
        self.text += text
        self._pending = b""


def streaming_detokenizer(tokenizer: TokenizerWrapper) -> StreamingDetokenizer | TableDetokenizer:
    """A new detokenizer for one answer, which continues its prompt: a leading space is part of the answer.

    mlx-lm's detokenizers drop that space, and print "!" for an id beyond the vocabulary, or raise. If mlx-lm knows no decoder
    it decodes each line separately, which drops a space at the beginning of each line. They are used for vocabularies whose
    spelling is not in `Spelling`.
    """
    table = token_table(tokenizer)
    return TableDetokenizer(table) if table.joins else tokenizer.detokenizer
