"""What token ids stand for: the bytes of every id of a vocabulary, and text from tokens as they come."""

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
"""Names of added tokens that grammars treat as special whatever their flag says, which is llguidance's own rule: Qwen's
`<tool_call>` and `<think>` lack the flag. Runs of spaces, which other vocabularies add, are text."""


class TokenTable:
    """The tokens of a tokenizer by id.

    Ids may have gaps, and a model's logits may be wider than the vocabulary: an id without a token stands for no bytes.
    """

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        vocabulary = cast("Mapping[str, int]", tokenizer.get_vocab())
        added = cast("Mapping[str, int]", tokenizer.get_added_vocab())
        self.bytes: list[bytes] = [b""] * (max(vocabulary.values(), default=-1) + 1)
        """By id, as many as the largest id plus one."""
        spelling = spelling_of(tokenizer, vocabulary.keys() - added.keys())
        self.joins = spelling is not None
        """Whether the bytes of an answer's tokens, one after the other, are its text."""
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
        """The tokens that are no text in a grammar, by their names. A grammar allows them only where it names them."""
        flagged = {id for id, token in decoder.items() if token.special}
        self.flagged = frozenset(flagged | set(cast("Sequence[int]", tokenizer.all_special_ids)))
        """Ids of the tokens that the tokenizer itself calls special."""

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
    """The parts of a normalizer, a pre-tokenizer or a decoder of tokenizer.json, without the sequences around them."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
    for part in step.get("normalizers", step.get("pretokenizers", step.get("decoders", ()))):
        yield from steps(part)


def part_steps(part: Normalizer | PreTokenizer | Decoder | None) -> Iterator[dict[str, Any]]:
    """The same of such a part of a tokenizer, without the vocabulary, which takes long to write as JSON."""
    return steps(json.loads(part.__getstate__()) if part is not None else None)


class Spelling(Enum):
    """How a vocabulary writes the bytes of its pieces. BYTE_LEVEL: each as one letter, as GPT-2's does. SENTENCE_PIECE: as
    text, with U+2581 for a space and `<0x0A>` for a single byte."""

    BYTE_LEVEL = "byte-level"
    SENTENCE_PIECE = "SentencePiece"


def spelling_of(tokenizer: TokenizerWrapper, pieces: Collection[str]) -> Spelling | None:
    """How the pieces of a vocabulary are written; None: in a way of which only the tokenizer's decoder makes text.

    The pieces themselves say it, by what they write for a space: some tokenizer.json name a decoder or a pre-tokenizer of the
    other kind. Where they are undecided, these parts do.
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
    """Whether a step of a decoder is one of those that the spellings stand for. They drop spaces at the beginning of a text,
    which an answer is not."""
    if step["type"] == "Replace":
        return (step["pattern"], step["content"]) == ({"String": _LOW_LINE}, " ")
    return step["type"] in {"ByteLevel", "ByteFallback", "Fuse", "Strip", "Metaspace"}


_SPACE_LETTER, _LOW_LINE = "\u0120", "\u2581"


# All pieces are converted as one text: 150,000 texts of their own would take several times as long.


def _byte_level_bytes(pieces: Collection[str]) -> list[bytes]:
    """What each piece stands for where letters stand for bytes. A piece with other letters stands for its UTF-8."""
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
"""A letter that no byte is."""


def _sentence_piece_bytes(pieces: Collection[str]) -> list[bytes]:
    """What each piece stands for where U+2581 stands for a space and `<0x0A>` for a byte."""
    joined, separator = _joined(pieces)
    texts = joined.replace(_LOW_LINE, " ").encode().split(separator.encode())
    return [
        bytes([int(piece[3:5], 16)]) if piece.startswith("<0x") and BYTE_FALLBACK.fullmatch(piece) else text
        for piece, text in zip(pieces, texts, strict=True)
    ]


def _joined(pieces: Collection[str]) -> tuple[str, str]:
    """All pieces as one text, and the character between them, which is in none."""
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
        """Bytes that do not end in a whole character yet."""
        self.text = ""

    def add_token(self, token: int) -> None:
        """Append a token. One without bytes adds nothing."""
        self._pending += self._table[token]
        text = self._pending.decode("utf-8", "replace")
        if not text.endswith("\ufffd"):
            self._append(text)

    def finalize(self) -> None:
        """Add incomplete characters to `text`, as U+FFFD. No token follows."""
        self._append(self._pending.decode("utf-8", "replace"))

    def _append(self, text: str) -> None:
        self.text += text
        self._pending = b""


def streaming_detokenizer(tokenizer: TokenizerWrapper) -> StreamingDetokenizer | TableDetokenizer:
    """A new detokenizer for one answer, which goes on behind its prompt: a space at its beginning is part of it.

    mlx-lm's own drop that space, and print "!" for an id beyond the vocabulary, or raise; where it knows no decoder it decodes
    each line by itself, which drops a space at each line's beginning. They serve vocabularies of other kinds than
    `Spelling` has.
    """
    table = token_table(tokenizer)
    return TableDetokenizer(table) if table.joins else tokenizer.detokenizer
