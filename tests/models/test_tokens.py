"""What token ids stand for, where ids have gaps and logits are wider than the vocabulary."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from mlx_lm.tokenizer_utils import StreamingDetokenizer
from mlx_lm.utils import load_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordPiece

from service.core import BadRequest, Grammar, GrammarKind, Reasoning
from service.models.calls import Markers
from service.models.text import TextEncoder
from service.models.tokens import TableDetokenizer, streaming_detokenizer, token_table
from tests.support.qwen import write_tokenizer

GAP = 9
"""Ids without a token, between the bytes and the words."""


def byte_level() -> Tokenizer:
    """256 bytes, a gap, two words in the model's own vocabulary, and an end token."""
    vocabulary = {letter: id for id, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary |= {"Hello": 256 + GAP, "\u0120world": 257 + GAP, "<end>": 258 + GAP, "<tag>": 259 + GAP}
    tokenizer = Tokenizer(BPE(vocabulary, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_piece() -> Tokenizer:
    """The same with SentencePiece's decoder. The words come first: mlx-lm loads no such vocabulary with a gap in front."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocabulary |= {"\u2581Hello": 257, "\u2581world": 258, "<end>": 259, "<tag>": 260}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True, ignore_merges=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


KINDS = {"byte-level": byte_level, "SentencePiece": sentence_piece}


def encoder(folder: Path, kind: str, width: int | None = None) -> TextEncoder:
    tokenizer = KINDS[kind]()
    tokenizer.add_tokens([AddedToken("<end>", special=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("<tag>", special=False, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return TextEncoder(load_tokenizer(folder), width)


def ids(encoder: TextEncoder, *pieces: str) -> list[int]:
    return [encoder._tokenizer.convert_tokens_to_ids(piece) for piece in pieces]


def detokenizer(encoder: TextEncoder) -> StreamingDetokenizer | TableDetokenizer:
    return streaming_detokenizer(encoder._tokenizer)


def text_of(encoder: TextEncoder, tokens: Sequence[int]) -> str:
    made = detokenizer(encoder)
    for token in tokens:
        made.add_token(token)
    made.finalize()
    return made.text


def test_real_tokens_beyond_a_gap_have_their_text(tmp_path: Path) -> None:
    gaps = encoder(tmp_path, "byte-level")
    assert ids(gaps, "Hello", "\u0120world") == [265, 266]
    assert text_of(gaps, [265, 266]) == "Hello world"
    assert gaps.token_bytes(266) == b" world"
    assert gaps.vocabulary == 269
    assert encoder(tmp_path, "byte-level", 300).vocabulary == 300


@pytest.mark.parametrize("kind", KINDS)
def test_ids_without_a_token_have_no_text(tmp_path: Path, kind: str) -> None:
    """In a gap, and beyond the vocabulary where logits are wider: a model may draw any of them."""
    wide = encoder(tmp_path, kind, 400)
    hello, world = ids(wide, *(("Hello", "\u0120world") if kind == "byte-level" else ("\u2581Hello", "\u2581world")))
    holes = [300, 399, 260] if kind == "byte-level" else [300, 399, 262]
    first = "" if kind == "byte-level" else " "
    assert text_of(wide, [holes[0], hello, holes[1], world, holes[2]]) == f"{first}Hello world"
    assert [wide.token_bytes(hole) for hole in holes] == [b""] * 3


def test_incomplete_characters_wait_and_end_as_replacements(tmp_path: Path) -> None:
    made = detokenizer(encoder(tmp_path, "SentencePiece"))
    # The bytes of an e with an acute, then the first half of another; a tag's letters between them stay letters.
    for token, text in ((0xC3 + 1, ""), (0xA9 + 1, "\xe9"), (260, "\xe9<tag>"), (0xC3 + 1, "\xe9<tag>")):
        made.add_token(token)
        assert made.text == text
    made.finalize()
    assert made.text == "\xe9<tag>\ufffd"


PREPENDED = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
DECODERS = {
    "SentencePiece": decoders.Sequence(PREPENDED),
    "SentencePiece without Strip": decoders.Sequence(PREPENDED[:3]),
    "Metaspace": decoders.Metaspace(prepend_scheme="always"),
    "Metaspace behind bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "byte-level": decoders.ByteLevel(),
    "byte-level in a sequence": decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
}
PRE_TOKENIZERS = {
    "byte-level": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "split": pre_tokenizers.Split(" ", "isolated"),
    "Metaspace": pre_tokenizers.Metaspace(),
}


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("before", PRE_TOKENIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_pieces_say_how_bytes_are_written(tmp_path: Path, kind: str, before: str, decoder: str) -> None:
    """Whatever decoder and pre-tokenizer a tokenizer.json names: the text, its first space, and a space behind a line's end."""
    space = "\u0120" if kind == "byte-level" else "\u2581"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = letters if kind == "byte-level" else [f"<0x{byte:02X}>" for byte in range(256)]
    words = [space + "Hello", space * 2 + "world", "\u010a" if kind == "byte-level" else "\n", space]
    vocabulary = {piece: id for id, piece in enumerate(dict.fromkeys([*pieces, *words, space + "a"]))}
    tokenizer = Tokenizer(BPE(vocabulary, [], ignore_merges=True, byte_fallback=kind != "byte-level"))
    tokenizer.pre_tokenizer, tokenizer.decoder = PRE_TOKENIZERS[before], DECODERS[decoder]
    tokenizer.add_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    made = TextEncoder(load_tokenizer(tmp_path))
    hello, world, line, blank = ids(made, *words)
    assert text_of(made, [blank, hello, world, line, world, blank]) == "  Hello  world\n  world "
    constraint = made.constraint(Grammar(GrammarKind.REGEX, "( Hello|  world|\\n)+", "f"), Reasoning.CLOSED)
    assert len(constraint.masks([hello, world, line])) == 4


def test_pieces_of_another_kind_are_left_to_their_decoder(tmp_path: Path) -> None:
    vocabulary = {piece: id for id, piece in enumerate(["[UNK]", "play", "##ing", "<end>"])}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert text_of(TextEncoder(load_tokenizer(tmp_path)), [1, 2]) == "playing"


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_may_lack_the_last_added_tokens(tmp_path: Path, kind: str) -> None:
    """Grammars are of its own tokens: a marker that it lacks is spelled out, and is no end."""
    whole = encoder(tmp_path, kind)
    end, tag = ids(whole, "<end>", "<tag>")
    assert tag == end + 1 == whole.vocabulary - 1
    narrow = encoder(tmp_path, kind, tag)
    constraint = narrow.constraint(Grammar(GrammarKind.REGEX, "(Hello|<tag>)+", "f"), Reasoning.CLOSED)
    mask = constraint.masks(())[0]
    assert len(mask) == -(-tag // 32) * 4 and not any(mask[id >> 3] >> (id & 7) & 1 for id in range(tag, len(mask) * 8))
    forced = narrow.constraint(Grammar(GrammarKind.CHOICE, '["<tag>"]', "f"), Reasoning.CLOSED).forced(99)
    assert b"".join(map(narrow.token_bytes, forced)) == b"<tag>" and max(forced) < tag
    table = token_table(narrow._tokenizer)
    assert Markers.of("<tag>", "<end>", table, tag) == Markers("<tag>", "<end>", ('"<tag>"',), (f"<[{end}]>",))


FRONTS = {"<s> $A": 1, "<s> $A <end>": 1, "<a> <s> $A": 2, "$A <end>": 0}


@pytest.mark.parametrize("around", FRONTS)
def test_tokens_at_the_front_are_there_once(tmp_path: Path, around: str) -> None:
    """A text that a chat template made begins with what the tokenizer puts before every text."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(name, special=True, normalized=False) for name in ("<s>", "<a>", "<end>")])
    named = [(name, tokenizer.token_to_id(name)) for name in around.split() if name != "$A"]
    tokenizer.post_processor = processors.TemplateProcessing(single=around, special_tokens=named)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "<end>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    made = TextEncoder(load_tokenizer(tmp_path))
    front = "".join(around.split("$A", maxsplit=1)[0].split())
    plain = made.encode_text("Hi <s> there")
    count = FRONTS[around]
    assert plain[:count] == tuple(ids(made, *around.split()[:count]))
    assert made.encode_text(f"{front}Hi <s> there") == plain
    # Two of them in the text itself are meant.
    assert made.encode_text(f"{front * 2}Hi") == (*plain[:count], *made.encode_text(f"{front}Hi"))
    assert made.encode_text("")[:count] == plain[:count]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [None, 400])
def test_grammars_of_a_vocabulary_with_gaps(tmp_path: Path, kind: str, width: int | None) -> None:
    gaps = encoder(tmp_path, kind, width)
    constraint = gaps.constraint(Grammar(GrammarKind.REGEX, "(Hello| world|<tag>|\xe9)+", "f"), Reasoning.CLOSED)
    tokens = {id for id in range(gaps.vocabulary) if constraint.masks(())[0][id >> 3] >> (id & 7) & 1}
    assert {gaps.token_bytes(token) for token in tokens} <= {b"H", b"Hello", b" world", b" ", b"<", b"\xc3", b" Hello"}
    assert b" world" in {gaps.token_bytes(token) for token in tokens}
    forced = gaps.constraint(Grammar(GrammarKind.CHOICE, '["Hello world<tag>\xe9e\u0301"]', "f"), Reasoning.CLOSED)
    tokens = forced.forced(99)
    assert b"".join(map(gaps.token_bytes, tokens)) == "Hello world<tag>\xe9e\u0301".encode()
    assert len(forced.masks(tokens)) == len(tokens) + 1


def test_gaps_are_in_no_text_of_a_grammar(tmp_path: Path) -> None:
    gaps = encoder(tmp_path, "byte-level", 400)
    constraint = gaps.constraint(Grammar(GrammarKind.REGEX, "(.|\\n)*", "f"), Reasoning.CLOSED)
    mask = constraint.masks(())[0]
    assert not [id for id in range(400) if mask[id >> 3] >> (id & 7) & 1 and not gaps.token_bytes(id)]


def test_a_grammar_may_name_any_id_of_the_logits(tmp_path: Path) -> None:
    wide = encoder(tmp_path, "byte-level", 400)
    constraint = wide.constraint(Grammar(GrammarKind.LARK, "start: <[399]> <[260]>", "f"), Reasoning.CLOSED)
    assert len(constraint.masks([399, 260])) == 3
    with pytest.raises(BadRequest, match="cannot be compiled"):
        wide.constraint(Grammar(GrammarKind.LARK, "start: <[400]>", "f"), Reasoning.CLOSED)


def test_forced_text_is_of_the_tokens_that_a_model_would_write(tmp_path: Path) -> None:
    """Merged as the tokenizer merges, also beside the letters of special tokens; the longest token at each place is another."""
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    grammar = Grammar(GrammarKind.CHOICE, '["atyp <tool_call><|im_end|>!"]', "f")
    tokens = TextEncoder(tokenizer).constraint(grammar, Reasoning.CLOSED).forced(99)
    merged = tokenizer.encode("atyp", add_special_tokens=False)
    starts = [piece for piece in token_table(tokenizer).bytes if piece and b"atyp".startswith(piece)]
    assert token_table(tokenizer)[merged[0]] != max(starts, key=len)
    assert tokens[: len(merged)] == merged


def test_added_tokens_are_special_by_flag_or_by_shape(tmp_path: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: id for id, letter in enumerate(letters)}, []))
    tokenizer.add_tokens([AddedToken("<end>", special=True), AddedToken("[CALL]", special=True)])
    tokenizer.add_tokens([AddedToken("<tag>", special=False), AddedToken("    ", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    assert sorted(token_table(load_tokenizer(tmp_path)).special) == ["<end>", "<tag>", "[CALL]"]


def test_pieces_with_letters_that_are_no_bytes_are_their_text(tmp_path: Path) -> None:
    odd = ["\u2581word", "a b", "\U0010ffff", "x\u20acy"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({piece: id for id, piece in enumerate([*letters, *odd])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    table = token_table(load_tokenizer(tmp_path))
    assert sorted(table.bytes[:256]) == [bytes([byte]) for byte in range(256)]
    assert table.bytes[256:] == [piece.encode() for piece in odd]


def test_a_vocabulary_without_bytes_has_no_grammar(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_tokens([AddedToken("<end>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}'
    )
    with pytest.raises(BadRequest, match="no form that grammars can use"):
        TextEncoder(load_tokenizer(tmp_path)).constraint(Grammar(GrammarKind.REGEX, "a", "f"), Reasoning.CLOSED)
