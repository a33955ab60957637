"""The markers around a call in every tool format, whatever they are in the vocabulary."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest
from mlx_lm.utils import load_tokenizer

from service.core import BadRequest, Grammar, GrammarKind, PieceKind, Reasoning
from service.models.calls import Markers
from service.models.text import TextEncoder
from service.models.tokens import streaming_detokenizer, token_table
from tests.support.qwen import Layout, write_tokenizer
from tests.support.tool_formats import CALLS, TOOLS, marked


def encoder_of(folder: Path, parser: str, layout: Layout) -> TextEncoder:
    module = import_module(f"mlx_lm.tool_parsers.{parser}")
    markers = (module.tool_call_start, module.tool_call_end)
    write_tokenizer(folder, layout, markers, tool_parser_type=parser)
    return TextEncoder(load_tokenizer(folder))


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("parser", sorted(CALLS))
def test_every_format_with_every_layout(tmp_path: Path, parser: str, layout: Layout) -> None:
    encoder = encoder_of(tmp_path, parser, layout)
    tokenizer, table = encoder._tokenizer, token_table(encoder._tokenizer)
    call = marked(parser, CALLS[parser])
    tokens = encoder.encode_text(call)

    detokenizer, reader = streaming_detokenizer(tokenizer), encoder.answer_reader(TOOLS, Reasoning.CLOSED)
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == call
    pieces = [*reader.add(call), *reader.finish(cut=False)]
    assert [piece.kind for piece in pieces] == [PieceKind.CALL]

    markers = Markers.of(tokenizer.tool_call_start or "", tokenizer.tool_call_end or "", table, len(table))
    start, end = markers.start, markers.end
    by_id = [f"<[{id}]>" for id in tokenizer.tool_call_start_tokens or ()]
    assert (list(start) == by_id) == (layout is not Layout.TEXT)
    # The tokens that the model itself writes are those that a grammar takes.
    grammar = Grammar(
        GrammarKind.LARK, "\n".join([f"start: {' '.join([*start, 'BODY', *end])}", "BODY: /(.|\\n)*/"]), "f"
    )
    constraint = encoder.constraint(grammar, Reasoning.CLOSED)
    assert len(constraint.masks(tokens)) == len(tokens) + 1
    if parser in ("json_tools", "qwen3_coder"):
        forced = encoder.constraint(encoder.call_grammar(TOOLS, several=False), Reasoning.CLOSED)
        free = encoder.constraint(encoder.free_call_grammar(TOOLS, {"weather"}), Reasoning.CLOSED)
        assert len(forced.masks(tokens)) == len(free.masks(tokens)) == len(tokens) + 1
        assert forced.forced(1) == [tokens[0]]
    else:
        with pytest.raises(BadRequest, match="no grammar here"):
            encoder.call_grammar(TOOLS, several=False)


@pytest.mark.parametrize("layout", Layout)
def test_a_marker_in_letters_begins_a_call_too(tmp_path: Path, layout: Layout) -> None:
    """Answers are read as text: a strict tool's arguments are valid however the marker was written."""
    encoder = encoder_of(tmp_path, "json_tools", layout)
    tokenizer = encoder._tokenizer
    letters = [id for letter in "<tool_call>" for id in tokenizer.encode(letter, add_special_tokens=False)]
    constraint = encoder.constraint(encoder.free_call_grammar(TOOLS, {"weather"}), Reasoning.CLOSED)
    assert len(constraint.masks(letters)) == len(letters) + 1
    constraint.advance(letters)
    forced = b"".join(map(encoder.token_bytes, constraint.forced(99)))
    assert forced
    assert b'\n{"name": "'.startswith(forced)


@pytest.mark.parametrize("layout", Layout)
def test_the_letters_of_a_marker_are_text_where_a_grammar_says_so(tmp_path: Path, layout: Layout) -> None:
    encoder = encoder_of(tmp_path, "json_tools", layout)
    constraint = encoder.constraint(
        Grammar(GrammarKind.CHOICE, '["<tool_call> is \\"<|im_end|>\\""]', "f"), Reasoning.CLOSED
    )
    tokens = constraint.forced(99)
    assert b"".join(map(encoder.token_bytes, tokens)).startswith(b'<tool_call> is "<|im_end|>')
    assert not set(token_table(encoder._tokenizer).special.values()) & set(tokens)
    assert len(constraint.masks(tokens)) == len(tokens) + 1
