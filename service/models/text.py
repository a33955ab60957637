"""Encodes chats and texts to token ids, and maps tokens to bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from threading import Lock
from typing import Any, cast

from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers.models import BPE
from transformers import AddedToken

from service.core import BadRequest, ChatEnd, Constraint, EncodedChat, Grammar, GrammarKind, HiddenTokens, Reasoning
from service.models.answer import NORMAL, REASONING, AnswerReader, transitions_of
from service.models.call_syntax import syntax_of
from service.models.calls import FORMATS, CallFormat, Markers, forced_calls, free_calls
from service.models.grammar import Grammars
from service.models.templates import ChatTemplate
from service.models.tokens import part_steps, token_table

LOSSLESS_STEPS = {"ByteLevel", "Digits", "Metaspace", "NFC", "Prepend", "Replace", "Split"}
"""Normalizers and pre-tokenizers (types of the tokenizers library) that drop no text. NFC may shorten it."""
NFC_SHRINKS = 3
"""Maximum factor by which NFC shortens UTF-8 (three Hangul letters of 3 bytes become one syllable of 3)."""


def bytes_per_token(tokenizer: TokenizerWrapper) -> int | None:
    """Maximum UTF-8 bytes of a token. A text with more than n times as many bytes has more than n tokens.

    None if there is no such bound, because the tokenizer drops text or has one token for every unknown word.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    model, table = backend.model, token_table(tokenizer)
    found = [step for part in (backend.normalizer, backend.pre_tokenizer) for step in part_steps(part)]
    kinds = {step["type"] for step in found}
    if not isinstance(model, BPE) or not kinds <= LOSSLESS_STEPS or any(_drops(step) for step in found):
        return None
    added = cast("Mapping[int, AddedToken]", tokenizer.added_tokens_decoder).values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    pieces = set(table.bytes)
    if not all(bytes([byte]) in pieces for byte in range(256)):
        return None
    if "ByteLevel" in kinds:
        longest = max(map(len, pieces))
    elif model.byte_fallback:
        # As written: a text may contain U+2581 itself, which takes more bytes than the space that it stands for.
        longest = max(len(piece.encode("utf-8", "replace")) for piece in tokenizer.get_vocab())
    else:
        return None
    return longest * NFC_SHRINKS if "NFC" in kinds else longest


def _drops(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return (step["pattern"], step["content"]) != ({"String": " "}, "\u2581")
    return step["type"] == "Split" and step["behavior"] == "Removed"


class TextEncoder:
    """core.Encoder over an mlx-lm tokenizer. Makes no MLX calls. Thread-safe: the tokenizer encodes under a lock.

    vocabulary: width of the target's logits; None: the tokenizer's largest id plus one. eos: tokens that end an answer; None:
    the tokenizer's.
    """

    def __init__(
        self, tokenizer: TokenizerWrapper, vocabulary: int | None = None, eos: Collection[int] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._table = token_table(tokenizer)
        self.vocabulary = vocabulary or len(self._table)
        ends = tokenizer.eos_token_ids if eos is None else eos
        self._template = ChatTemplate(tokenizer)
        self._grammars = Grammars(tokenizer, self.vocabulary, ends)
        self._transitions = transitions_of(tokenizer, tools=True)
        self._transitions_without_tools = transitions_of(tokenizer, tools=False)

    def forget(self) -> None:
        """Drop what is stored of requests: compiled grammars, and the tokenizer's cache of words and their tokens."""
        self._grammars.forget()
        with self._lock:
            model = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "model", None)
            # BPE and Unigram tokenizers have such a cache, of 10,000 words.
            if (clear := getattr(model, "_clear_cache", None)) is not None:
                clear()

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        options: Mapping[str, object] | None = None,
        end: ChatEnd = ChatEnd.NEW_TURN,
    ) -> EncodedChat:
        """See core.Encoder. Raises BadRequest if the model has no chat template, if there are tools but mlx-lm cannot parse the
        model's calls, and if the template refuses."""
        if not self._tokenizer.has_chat_template:
            raise BadRequest("this model has no chat template: send a prompt instead of messages", field="messages")
        if tools and not self._tokenizer.has_tool_calling:
            raise BadRequest("this model was not trained to call tools: its chat template has none", field="tools")
        text, reasoning = self._template.render(messages, tools, options or {}, end)
        with self._lock:
            tokens = cast("list[int]", self._tokenizer.encode(text, add_special_tokens=False))
        return EncodedChat(tuple(tokens), reasoning)

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of a completion prompt, with the tokenizer's leading special tokens. They are not repeated if the text
        already begins with them, as the output of a chat template does."""
        with self._lock:
            tokens = tuple(cast("list[int]", self._tokenizer.encode(text)))
        front = self._front
        twice = bool(front) and tokens[: 2 * len(front)] == front * 2
        return tokens[len(front) :] if twice else tokens

    @cached_property
    def _front(self) -> tuple[int, ...]:
        """Special tokens that the tokenizer puts before a text."""
        with self._lock:
            whole, text = (
                tuple(cast("list[int]", self._tokenizer.encode("a", add_special_tokens=add))) for add in (True, False)
            )
        starts = (at for at in range(len(whole) - len(text) + 1) if whole[at : at + len(text)] == text)
        return whole[: next(starts, 0)]

    def encode_word(self, text: str) -> tuple[tuple[int, ...], ...]:
        """See core.Encoder. As with vLLM's bad words, leading spaces are dropped first."""
        word = text.lstrip()
        with self._lock:
            found = [
                tuple(cast("list[int]", self._tokenizer.encode(before + word, add_special_tokens=False)))
                for before in ("", " ")
            ]
        return tuple(dict.fromkeys(tokens for tokens in found if tokens))

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """See core.Encoder. Ids that the model lacks are omitted."""
        with self._lock:
            tokens = cast("list[int]", self._tokenizer.encode(text, add_special_tokens=False))
        return tuple(token for token in tokens if token < self.vocabulary)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token: not always whole characters, and none for an id without a token."""
        # Without the lock, which a long prompt holds, because the API's event loop calls this.
        return self._table[token]

    def answer_reader(self, tools: Sequence[Mapping[str, object]], reasoning: Reasoning) -> AnswerReader:
        """See core.Encoder."""
        tokenizer = self._tokenizer
        state = tokenizer.response_initial_state or (REASONING if reasoning is Reasoning.OPEN else NORMAL)
        if not tools or not tokenizer.has_tool_calling:
            return AnswerReader(self._transitions_without_tools, state, opening=tokenizer.think_start)
        known = FORMATS.get(tokenizer.tool_parser)
        syntax = syntax_of(tokenizer, None if known is None else known.parse)
        return AnswerReader(self._transitions, state, syntax, tools, tokenizer.think_start)

    def hidden_tokens(self, *, split: bool, tools: bool, stop: Sequence[str]) -> HiddenTokens:
        """See core.Encoder."""
        tokenizer, shown = self._tokenizer, list(stop)
        calls = split and tools and tokenizer.has_tool_calling
        if split:
            shown += [text for text in (tokenizer.think_start, tokenizer.think_end) if text]
            shown += tokenizer.structural_markers
            shown += [marker for edges in tokenizer.response_transitions.values() for marker, _ in edges]
        start, end = (tokenizer.tool_call_start or "", tokenizer.tool_call_end or "") if calls else ("", "")
        shown += [start, end]
        names = {id: self._table[id].decode("utf-8", "replace") for id in self._table.flagged}
        return HiddenTokens(
            frozenset(id for id, name in names.items() if not any(name in text for text in shown)), start, end
        )

    def constraint(self, grammar: Grammar, reasoning: Reasoning) -> Constraint:
        """See core.Encoder."""
        tokenizer = self._tokenizer
        opening, closing = tokenizer.think_start_tokens or (), tokenizer.think_end_tokens or ()
        if reasoning is Reasoning.OPEN:
            return self._grammars.constraint(grammar, closing=closing)
        if reasoning is Reasoning.CLOSED or len(opening) != 1:
            return self._grammars.constraint(grammar)
        return self._grammars.constraint(grammar, opening[0], closing)

    def call_grammar(
        self, tools: Sequence[Mapping[str, object]], *, several: bool, otherwise: Grammar | None = None
    ) -> Grammar:
        """See core.Encoder."""
        text = forced_calls(*self._call_format(), tools, several=several, otherwise=otherwise)
        return Grammar(GrammarKind.LARK, text, "tools")

    def free_call_grammar(self, tools: Sequence[Mapping[str, object]], strict: Collection[str]) -> Grammar:
        """See core.Encoder."""
        text = free_calls(*self._call_format(), tools, strict)
        return Grammar(GrammarKind.LARK, text, "tools")

    @property
    def binds_calls(self) -> bool:
        """See core.Encoder."""
        return self._tokenizer.has_tool_calling and self._tokenizer.tool_parser in FORMATS

    def _call_format(self) -> tuple[CallFormat, Markers]:
        """The model's tool call format. Raises BadRequest if it has no grammar."""
        tokenizer = self._tokenizer
        if not tokenizer.has_tool_calling:
            raise BadRequest("this model was not trained to call tools: its chat template has none", field="tools")
        if not self.binds_calls:
            raise BadRequest("this model's format for calls has no grammar here", field="tool_choice")
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
        assert start is not None
        assert end is not None
        return FORMATS[tokenizer.tool_parser], Markers.of(start, end, self._table, self.vocabulary)
