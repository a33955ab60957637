"""Text to token ids: errors name the field, threads do not disturb each other."""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from service.core import BadRequest, Grammar, GrammarKind, PieceKind, Reasoning, ToolCall
from service.models.text import TextEncoder, bytes_per_token
from tests.support.heap import holders

MakeModel = Callable[..., Path]


def test_messages_need_a_chat_template(make_model: MakeModel) -> None:
    encoder = TextEncoder(load_tokenizer(make_model("m", template=None)))
    with pytest.raises(BadRequest, match="no chat template") as caught:
        encoder.encode_chat([{"role": "user", "content": "hi"}])
    assert caught.value.field == "messages"


def test_messages_that_the_template_refuses_are_a_bad_request(make_model: MakeModel) -> None:
    encoder = TextEncoder(load_tokenizer(make_model("m")))
    with pytest.raises(BadRequest, match="unknown role") as caught:
        encoder.encode_chat([{"role": "wizard", "content": "hi"}])
    assert caught.value.field == "messages"


def test_many_threads_get_the_same_as_one(make_model: MakeModel) -> None:
    encoder = TextEncoder(load_tokenizer(make_model("m")))
    chats = [[{"role": "user", "content": f"question {number} " * (number % 7 + 1)}] for number in range(200)]
    alone = [encoder.encode_chat(chat) for chat in chats]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(encoder.encode_chat, chats))
    assert together == alone


def test_the_bytes_of_tokens_wait_for_no_prompt(make_model: MakeModel) -> None:
    """An event loop asks for them while other threads encode."""
    encoder = TextEncoder(load_tokenizer(make_model("m")))
    alone = [encoder.token_bytes(token) for token in range(encoder.vocabulary)]
    with ThreadPoolExecutor(1) as pool, encoder._lock:
        asked = pool.submit(lambda: [encoder.token_bytes(token) for token in range(encoder.vocabulary)])
        assert asked.result(timeout=30) == alone
    chat = [{"role": "user", "content": "a long question " * 2000}]
    with ThreadPoolExecutor(4) as pool:
        encoding = [pool.submit(encoder.encode_chat, chat) for _ in range(8)]
        while not all(each.done() for each in encoding):
            assert [encoder.token_bytes(token) for token in range(encoder.vocabulary)] == alone
    assert len({each.result() for each in encoding}) == 1


# ------------------------------------------------------------------------------------------------------- bytes per token


def wrapped(tokenizer: Tokenizer) -> TokenizerWrapper:
    return TokenizerWrapper(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


def byte_level(*merged: str, complete: bool = True) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = [*(alphabet if complete else alphabet[1:]), *merged]
    tokenizer = Tokenizer(BPE({token: number for number, token in enumerate(vocabulary)}, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def sentence_piece(*, byte_fallback: bool) -> Tokenizer:
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581\u2581"]
    model = BPE(
        vocab={token: number for number, token in enumerate(vocabulary)},
        merges=[("\u2581", "\u2581")],
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=byte_fallback,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return tokenizer


def test_the_longest_token_sets_the_bytes_per_token() -> None:
    assert bytes_per_token(wrapped(byte_level("\u0120\u0120", "abc"))) == 3
    special = byte_level("abc")
    special.add_special_tokens([AddedToken("<|end|>", special=True)])
    assert bytes_per_token(wrapped(special)) == len("<|end|>")
    assert bytes_per_token(wrapped(sentence_piece(byte_fallback=True))) == 6
    composing = byte_level("abc")
    composing.normalizer = normalizers.NFC()
    assert bytes_per_token(wrapped(composing)) == 3 * 3


def test_no_bound_where_a_tokenizer_may_drop_or_swallow_text() -> None:
    assert bytes_per_token(wrapped(byte_level(complete=False))) is None
    assert bytes_per_token(wrapped(sentence_piece(byte_fallback=False))) is None
    stripping = byte_level()
    stripping.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    assert bytes_per_token(wrapped(stripping)) is None
    dropping = byte_level()
    dropping.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), dropping.pre_tokenizer])
    assert bytes_per_token(wrapped(dropping)) is None
    shrinking = byte_level()
    shrinking.normalizer = normalizers.Replace("aa", "a")
    assert bytes_per_token(wrapped(shrinking)) is None
    swallowing = byte_level()
    swallowing.add_special_tokens([AddedToken("<|end|>", special=True, rstrip=True)])
    assert bytes_per_token(wrapped(swallowing)) is None
    words = Tokenizer(WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    assert bytes_per_token(wrapped(words)) is None


def test_composing_shrinks_text_at_most_threefold() -> None:
    characters = [chr(point) for point in range(sys.maxunicode + 1) if not 0xD800 <= point < 0xE000]
    written = ((unicodedata.normalize("NFD", one), one, unicodedata.normalize("NFC", one)) for one in characters)
    assert max(max(len(d.encode()), len(o.encode())) / len(c.encode()) for d, o, c in written) <= 3


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from(["a", "  ", "abc", "\u00e9", "e\u0301", "\u1112\u1161\u11ab", "\u96ea", "<|end|>"]), max_size=30
    )
)
@example(["\u1112\u1161\u11ab"])
def test_no_text_has_fewer_tokens_than_its_bytes_say(parts: list[str]) -> None:
    text = "".join(parts)
    composing = byte_level("abc", "\u00ed\u0137\u013e")
    composing.normalizer = normalizers.NFC()
    for tokenizer in (composing, sentence_piece(byte_fallback=True)):
        most = bytes_per_token(wrapped(tokenizer))
        assert most is not None
        assert len(tokenizer.encode(text).ids) * most >= len(text.encode())


# --------------------------------------------------------------------------------------------- tokens, tools, reasoning


def test_a_token_s_bytes_make_up_the_text(make_model: MakeModel) -> None:
    tokenizer = wrapped(byte_level("ab", "Ġthe"))
    encoder = TextEncoder(tokenizer)
    text = "the 🌍 ab\n"
    assert b"".join(map(encoder.token_bytes, encoder.encode_text(text))) == text.encode()
    assert encoder.vocabulary == len(tokenizer)


def test_a_word_is_encoded_without_and_with_a_space_before_it() -> None:
    tokenizer = byte_level("cat", "Ġcat", "Ġ")
    encoder, ids = TextEncoder(wrapped(tokenizer)), tokenizer.get_vocab()
    for text in ("cat", " cat", "  cat"):
        assert encoder.encode_word(text) == ((ids["cat"],), (ids["Ġcat"],))
    assert encoder.encode_word("dog") == (tuple(ids[x] for x in "dog"), tuple(ids[x] for x in "Ġdog"))
    assert encoder.encode_word(" ") == ((ids["Ġ"],),)
    leading = byte_level("cat")
    leading.add_special_tokens([AddedToken("<s>", special=True)])
    leading.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    assert TextEncoder(wrapped(leading)).encode_word("cat")[0] == (leading.token_to_id("cat"),)


def test_bytes_of_sentencepiece_vocabularies_and_of_added_tokens() -> None:
    tokenizer = Tokenizer(BPE({"<0xE9>": 0, "▁the": 1, "é": 2}, [], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    encoder = TextEncoder(wrapped(tokenizer))
    assert [encoder.token_bytes(token) for token in range(4)] == [b"\xe9", b" the", "é".encode(), b"<|end|>"]


def test_tools_need_a_model_that_calls_them(make_model: MakeModel) -> None:
    encoder = TextEncoder(load_tokenizer(make_model("m")))
    with pytest.raises(BadRequest, match="not trained to call tools") as caught:
        encoder.encode_chat([{"role": "user", "content": "hi"}], [{"type": "function", "function": {"name": "f"}}])
    assert caught.value.field == "tools"


HERMES = (
    "{% if tools %}{% for tool in tools %}<tool>{{ tool.function.name }}</tool>{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for tool_call in message.tool_calls %}<tool_call>{{ tool_call.name }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{{ opening }}{% endif %}"
)


def test_tools_and_options_reach_the_template(make_model: MakeModel) -> None:
    tokenizer = load_tokenizer(make_model("m", template=HERMES))
    encoder = TextEncoder(tokenizer)
    tools = [{"type": "function", "function": {"name": "now", "parameters": {}}}]
    options = {"opening": "so "}
    encoded = encoder.encode_chat([{"role": "user", "content": "hi"}], tools, options)
    assert tokenizer.decode(list(encoded.tokens)).strip() == "<tool>now</tool>user:hiassistant:so"
    pieces = encoder.answer_reader(tools, encoded.reasoning).add('x<tool_call>{"name": "now"}</tool_call>')
    assert [piece.text or piece.call for piece in pieces] == ["x", ToolCall("now", "{}")]
    reader, text = encoder.answer_reader((), encoded.reasoning), 'x<tool_call>{"name": "now"}</tool_call>'
    assert "".join(piece.text for piece in [*reader.add(text), *reader.finish(cut=False)]) == text, "it has no tools"

    for name in ("max_length", "padding", "add_generation_prompt", "tokenizer_kwargs"):
        with pytest.raises(BadRequest, match=name) as caught:
            encoder.encode_chat([{"role": "user", "content": "hi"}], tools, {name: 3})
        assert caught.value.field == "chat_template_kwargs"


def test_tools_too_deep_for_the_template_are_a_bad_request(make_model: MakeModel) -> None:
    encoder = TextEncoder(load_tokenizer(make_model("m", template=f"{{{{ tools | tojson }}}}{HERMES}")))
    deep: dict[str, object] = {}
    for _ in range(50_000):
        deep = {"items": deep}
    tools = [{"type": "function", "function": {"name": "now", "parameters": deep}}]
    with pytest.raises(BadRequest, match="template refuses") as caught:
        encoder.encode_chat([{"role": "user", "content": "hi"}], tools)
    assert caught.value.field == "messages"


THINKING = (
    "{% for message in messages %}<s>{{ message.role }}:{{ message.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{{ ending }}{% endif %}"
)
ASKED = [
    {"role": "user", "content": "what does <think> mean?"},
    {"role": "assistant", "content": "<think>x</think>y"},
    {"role": "user", "content": "<think>"},
]


def thinking_encoder() -> TextEncoder:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<think>", "</think>", "<s>", "</s>")])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=THINKING)
    return TextEncoder(TokenizerWrapper(fast))


@pytest.mark.nightly
def test_what_requests_left_is_forgotten() -> None:
    encoder = thinking_encoder()

    def secrets(time: str) -> list[str]:
        return ["-".join((word, time, "4b1d")) for word in ("note", "choice")]

    def use(time: str) -> list[bytes]:
        note, choice = secrets(time)
        encoded = encoder.encode_chat(
            [{"role": "user", "content": note}], (), {"ending": "<think></think>", "note": note}
        )
        return encoder.constraint(Grammar(GrammarKind.CHOICE, json.dumps([choice]), "f"), encoded.reasoning).masks(())

    before = use("first")
    encoder.forget()
    assert use("later") == before
    held = holders(lambda: ([], [*secrets("first"), *secrets("later")]))
    assert len(held) == 1, "what came later, by grammar, and nothing of the first"
    encoder.forget()
    assert use("first") == before
    # What else is cleared is not to be seen from Python.
    assert callable(getattr(byte_level().model, "_clear_cache"))  # noqa: B009


@pytest.mark.parametrize(
    ("ending", "reasoning", "free"), [("<think>", "a", True), ("<think></think>", "", False), ("", "", None)]
)
def test_only_the_template_says_whether_the_answer_reasons(
    make_model: MakeModel, ending: str, reasoning: str, free: bool | None
) -> None:
    encoder, options = thinking_encoder(), {"ending": ending}
    encoded = encoder.encode_chat(ASKED, (), options)
    reader = encoder.answer_reader((), encoded.reasoning)
    pieces = [*reader.add("a"), *reader.finish(cut=False)]
    assert "".join(piece.text for piece in pieces if piece.kind is PieceKind.REASONING) == reasoning
    grammar = Grammar(GrammarKind.CHOICE, '["yes"]', "f")
    mask = encoder.constraint(grammar, encoded.reasoning).masks(())[0]
    allowed = {t for t in range(encoder.vocabulary) if mask[t >> 3] >> (t & 7) & 1}
    yes, think, end = (set(encoder.encode_text(text)) for text in ("y", "<think>", "</s>"))
    if free:
        assert allowed == set(range(encoder.vocabulary)) - end
    else:
        assert allowed == (yes if free is False else yes | think)
    plain = encoder.constraint(grammar, Reasoning.CLOSED).masks(())[0]
    assert {t for t in range(encoder.vocabulary) if plain[t >> 3] >> (t & 7) & 1} == yes
