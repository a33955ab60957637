"""Encodes chats and texts to token ids, and says what bytes a token stands for."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from functools import cached_property
from threading import Lock
from typing import Any, cast

from jinja2 import TemplateError
from mlx_lm.generate import make_text_state_machine
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers.models import BPE
from transformers import AddedToken, PreTrainedTokenizerBase

from service.core import BadRequest, Constraint, Grammar, GrammarKind, HiddenTokens
from service.models.answer import AnswerReader
from service.models.calls import FORMATS, CallFormat, Markers, forced_calls, free_calls
from service.models.grammar import Grammars
from service.models.tokens import part_steps, token_table

LOSSLESS_STEPS = {"ByteLevel", "Digits", "Metaspace", "NFC", "Prepend", "Replace", "Split"}
"""Normalizers and pre-tokenizers (types of the tokenizers library) that drop no text. NFC may shorten it."""
OWN_ARGUMENTS = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters, "messages"}
"""Arguments of apply_chat_template itself, which are not a request's to set."""
MANY_OPTIONS = 64
NFC_SHRINKS = 3
"""NFC shortens UTF-8 at most by this factor (three Hangul letters of 3 bytes become one syllable of 3)."""


def bytes_per_token(tokenizer: TokenizerWrapper) -> int | None:
    """The largest number of UTF-8 bytes that one token stands for: a text of more than n times as many has more than n tokens.

    None where there is no such bound, because the tokenizer drops text or has one token for every unknown word.
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
        # As written: a text may hold U+2581 itself, which takes more bytes than the space that it stands for.
        longest = max(len(piece.encode("utf-8", "replace")) for piece in tokenizer.get_vocab())
    else:
        return None
    return longest * NFC_SHRINKS if "NFC" in kinds else longest


def _drops(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return (step["pattern"], step["content"]) != ({"String": " "}, "\u2581")
    return step["type"] == "Split" and step["behavior"] == "Removed"


class Reasoning(Enum):
    """What a chat template has done about reasoning: started it, left it to the model, or ended it (or there is none)."""

    OPEN = "open"
    FREE = "free"
    CLOSED = "closed"


class _WithoutTools:
    """A tokenizer as one of a model that calls no tools: what a model writes that was given none is text."""

    has_tool_calling = False

    def __init__(self, tokenizer: TokenizerWrapper) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class TextEncoder:
    """core.Encoder over an mlx-lm tokenizer. Makes no MLX calls. Thread-safe: the tokenizer encodes under a lock.

    vocabulary: width of the target's logits; None: the tokenizer's largest id plus one. eos: tokens that end an answer;
    None: the tokenizer's own.
    """

    def __init__(
        self, tokenizer: TokenizerWrapper, vocabulary: int | None = None, eos: Collection[int] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._table = token_table(tokenizer)
        self.vocabulary = vocabulary or len(self._table)
        ends = tokenizer.eos_token_ids if eos is None else eos
        self._generation_prompts: dict[str, list[int]] = {}
        """By the template's options."""
        self._grammars = Grammars(tokenizer, self.vocabulary, ends)
        self._states = make_text_state_machine(tokenizer)
        self._states_without_tools = make_text_state_machine(_WithoutTools(tokenizer))

    def forget(self) -> None:
        """Drop what is stored of requests: compiled grammars, options of templates, and words that the tokenizer remembers with
        their tokens."""
        self._grammars.forget()
        with self._lock:
            self._generation_prompts.clear()
            model = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "model", None)
            # Tokenizers of the BPE and Unigram kinds have such a cache, of 10,000 words.
            if (clear := getattr(model, "_clear_cache", None)) is not None:
                clear()

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[Mapping[str, object]] = (),
        options: Mapping[str, object] | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a chat by the model's chat template, with the generation prompt. Messages: `role`, `content` and what
        else the template reads. tools: function descriptions in OpenAI's shape. options: further arguments of the template.

        Raises BadRequest when the model has no chat template, when it has tools but the model's answers hold no calls that
        mlx-lm can parse, or when the template refuses.
        """
        if not self._tokenizer.has_chat_template:
            raise BadRequest("this model has no chat template: send a prompt instead of messages", field="messages")
        if tools and not self._tokenizer.has_tool_calling:
            raise BadRequest("this model was not trained to call tools: its chat template has none", field="tools")
        turns = [dict(message) for message in messages]
        extra: dict[str, Any] = dict(options or {})
        for name in sorted(OWN_ARGUMENTS & extra.keys()):
            raise BadRequest(f"{name} is not an argument of the chat template", field="chat_template_kwargs")
        if tools:
            extra["tools"] = [dict(tool) for tool in tools]
        try:
            with self._lock:
                tokens = self._tokenizer.apply_chat_template(turns, add_generation_prompt=True, **extra)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as error:
            raise BadRequest(f"the model's chat template refuses these messages: {error}", field="messages") from error
        return tuple(cast("list[int]", tokens))

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Token ids of a completion prompt, with the tokenizer's leading special tokens; once, where the text begins with them,
        as one that a chat template made does."""
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
        """See core.Encoder. As vLLM's bad words: spaces at its beginning are dropped first."""
        word = text.lstrip()
        with self._lock:
            found = [
                tuple(cast("list[int]", self._tokenizer.encode(before + word, add_special_tokens=False)))
                for before in ("", " ")
            ]
        return tuple(dict.fromkeys(tokens for tokens in found if tokens))

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """See core.Encoder. Ids that the model does not have are left out."""
        with self._lock:
            tokens = cast("list[int]", self._tokenizer.encode(text, add_special_tokens=False))
        return tuple(token for token in tokens if token < self.vocabulary)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for: not always whole characters, and none for an id without a token."""
        # Without the lock, which a long prompt holds: the API's event loop calls this.
        return self._table[token]

    def answer_reader(self, tools: Sequence[Mapping[str, object]], options: Mapping[str, object]) -> AnswerReader:
        """See core.Encoder."""
        tokenizer = self._tokenizer
        state = "reasoning" if self._reasoning(options) is Reasoning.OPEN else "normal"
        start = tokenizer.tool_call_start or ""
        machine, parser = self._states_without_tools, None
        if tools:
            known = FORMATS.get(tokenizer.tool_parser)
            machine, parser = self._states, tokenizer.tool_parser if known is None else known.parse
        return AnswerReader(machine.make_state(tokenizer.response_initial_state or state), parser, tools, start)

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

    def constraint(self, grammar: Grammar, options: Mapping[str, object] | None) -> Constraint:
        """See core.Encoder."""
        tokenizer = self._tokenizer
        opening, closing = tokenizer.think_start_tokens or (), tokenizer.think_end_tokens or ()
        reasoning = Reasoning.CLOSED if options is None else self._reasoning(options)
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
        """How the model writes calls. Raises BadRequest where that has no grammar."""
        tokenizer = self._tokenizer
        if not tokenizer.has_tool_calling:
            raise BadRequest("this model was not trained to call tools: its chat template has none", field="tools")
        if not self.binds_calls:
            raise BadRequest("this model's format for calls has no grammar here", field="tool_choice")
        start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
        assert start is not None
        assert end is not None
        return FORMATS[tokenizer.tool_parser], Markers.of(start, end, self._table, self.vocabulary)

    def _reasoning(self, options: Mapping[str, object]) -> Reasoning:
        """What the chat template says of reasoning where the assistant's turn begins."""
        if not self._tokenizer.has_thinking:
            return Reasoning.CLOSED
        tokens = self._generation_prompt(options)
        opened, closed = self._tokenizer.rfind_think_start(tokens), self._tokenizer.rfind_think_end(tokens)
        return Reasoning.OPEN if opened > closed else Reasoning.CLOSED if closed >= 0 else Reasoning.FREE

    def _generation_prompt(self, options: Mapping[str, object]) -> list[int]:
        """What the template adds to a chat so that the assistant speaks: what users write is not in it."""
        key = repr(sorted(options.items()))
        if (known := self._generation_prompts.get(key)) is not None:
            return known
        turns, extra = [{"role": "user", "content": "."}], dict[str, Any](options)
        with self._lock:
            whole, turn = (
                cast("list[int]", self._tokenizer.apply_chat_template(turns, add_generation_prompt=add, **extra))
                for add in (True, False)
            )
        if len(self._generation_prompts) >= MANY_OPTIONS:
            self._generation_prompts.clear()
        self._generation_prompts[key] = found = whole[len(turn) :] if whole[: len(turn)] == turn else whole
        return found
