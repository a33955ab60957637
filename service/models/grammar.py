"""Grammars that answers must follow, compiled by llguidance to which tokens may come next."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from enum import Enum
from typing import Any, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from llguidance.hf import from_tokenizer
from mlx_lm.tokenizer_utils import TokenizerWrapper
from transformers import PreTrainedTokenizerFast

from service.core import BadRequest, Grammar, GrammarKind

MAX_CHARS = 2**17
"""Characters of a grammar or schema."""
COMPILED = 64
"""Grammars that stay compiled."""
LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_items_in_row=500,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""A tenth to a half of llguidance's own: a mask takes 4 ms at most, since every row of a batch waits for it."""
PROBED = 16
"""Tokens of an answer that are tried when a grammar is compiled: some meet their limits only then."""
JSON_STYLE: dict[str, Any] = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""JSON as `json.dumps` writes it: what no choice is left to can be proposed without a draft."""


def compiled_text(grammar: Grammar) -> str:
    """A grammar as llguidance takes it. Raises BadRequest for a schema or a list that is none."""
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return LLMatcher.grammar_from_json_schema(grammar.source, overrides=cast("Any", JSON_STYLE))
            case GrammarKind.CHOICE:
                choices = [json.dumps(choice, ensure_ascii=False) for choice in json.loads(grammar.source)]
                return grammar_from("lark", "start: " + " | ".join(choices))
            case GrammarKind.REGEX:
                return grammar_from("regex", grammar.source)
            case GrammarKind.LARK:
                return grammar_from("lark", grammar.source)
    except ValueError as error:
        raise BadRequest(f"it cannot be compiled: {error}", field=grammar.field) from error


def hermes_grammar(tools: Sequence[Mapping[str, Any]], start: str, end: str, *, several: bool) -> str:
    """Lark of one call or several in the format of mlx-lm's json_tools: a JSON object of name and arguments between markers,
    which are written as Lark takes them."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema = json.dumps({"anyOf": calls, "x-guidance": JSON_STYLE})
    more = '("\\n" call)*' if several else ""
    return f'start: call {more}\ncall: {start} "\\n" arguments "\\n" {end}\narguments: %json {schema}\n'


class Grammars:
    """Compiles grammars for one tokenizer. vocabulary: width of the target's logits. eos: tokens that end an answer.
    Thread-safe, and slow: not for the engine's thread."""

    def __init__(self, tokenizer: TokenizerWrapper, vocabulary: int, eos: Collection[int]) -> None:
        self._source = tokenizer
        self._vocabulary = vocabulary
        self._eos = frozenset(eos)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def constraint(self, grammar: Grammar, opening: int | None = None, closing: Sequence[int] = ()) -> TokenConstraint:
        """What keeps one answer within a grammar. closing: tokens that end the reasoning before it, which is free. opening: the
        token that begins the reasoning, where the model may do without; None: it has begun, or there is none (closing is
        empty). Raises BadRequest for a grammar that is too large, or cannot be compiled."""
        if len(grammar.source) > MAX_CHARS:
            raise BadRequest(f"it is longer than {MAX_CHARS} characters", field=grammar.field)
        text = compiled_text(grammar)
        with self._lock:
            tokenizer = self._tokenizer = self._tokenizer or self._make_tokenizer(grammar.field)
            matcher = self._compiled.pop(text, None) or _compile(tokenizer, text, grammar.field)
            self._compiled[text] = matcher
            if len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
            copy = matcher.deep_copy()
        return TokenConstraint(tokenizer, copy, text, self._vocabulary, self._eos, opening, tuple(closing))

    def _make_tokenizer(self, field: str) -> LLTokenizer:
        inner = getattr(self._source, "_tokenizer", None)
        if not isinstance(inner, PreTrainedTokenizerFast) or not self._eos:
            raise BadRequest("this model's tokenizer has no form that grammars can use", field=field)
        return from_tokenizer(inner, n_vocab=max(self._vocabulary, len(inner)), eos_token=sorted(self._eos))


def _compile(tokenizer: LLTokenizer, grammar: str, field: str) -> LLMatcher:
    matcher = LLMatcher(tokenizer, grammar, limits=LIMITS, log_level=0)
    tried = matcher.deep_copy()
    for _ in range(PROBED):
        if tried.is_error() or tried.is_stopped():
            break
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(tried.compute_bitmask(), np.uint8), bitorder="little"))
        if len(allowed):
            tried.consume_token(int(allowed[len(allowed) // 2]))
    if tried.is_error():
        raise BadRequest(f"it cannot be compiled: {tried.get_error().splitlines()[0]}", field=field)
    return matcher


class _Phase(Enum):
    """Where an answer is. START: it may begin to reason, or begin what the grammar says."""

    START = "start"
    REASONING = "reasoning"
    GRAMMAR = "grammar"


class TokenConstraint:
    """core.Constraint by llguidance. opening, closing: see Grammars.constraint."""

    def __init__(
        self,
        tokenizer: LLTokenizer,
        matcher: LLMatcher,
        grammar: str,
        vocabulary: int,
        eos: frozenset[int],
        opening: int | None,
        closing: tuple[int, ...],
    ) -> None:
        self.grammar = grammar
        self._tokenizer = tokenizer
        self._matcher = matcher
        self._bytes = -(-vocabulary // 32) * 4
        self._eos = eos
        self._opening = opening
        self._closing = closing
        self._phase = _Phase.GRAMMAR
        if closing:
            self._phase = _Phase.REASONING if opening is None else _Phase.START
        self._tail: tuple[int, ...] = ()
        """The last tokens of the reasoning, as many as end it."""
        self._fed = 0
        """Tokens that the grammar has consumed."""
        self._stuck = False

    def copy(self) -> TokenConstraint:
        """See core.Constraint."""
        matcher, width = self._matcher.deep_copy(), self._bytes * 8
        matcher.reset()
        return TokenConstraint(self._tokenizer, matcher, self.grammar, width, self._eos, self._opening, self._closing)

    @property
    def failed(self) -> bool:
        """See core.Constraint."""
        return self._stuck or self._matcher.is_error()

    def masks(self, proposed: Sequence[int]) -> list[bytes]:
        """See core.Constraint."""
        masks, before = [self._mask()], (self._phase, self._tail, self._fed)
        for token in proposed:
            if token in self._eos or not masks[-1][token >> 3] >> (token & 7) & 1:
                break
            self.advance([token])
            masks.append(self._mask())
        self._matcher.rollback(self._fed - before[2])
        self._phase, self._tail, self._fed = before
        return masks

    def advance(self, tokens: Sequence[int]) -> None:
        """See core.Constraint."""
        for token in tokens:
            if self._phase is _Phase.REASONING:
                self._tail = (*self._tail, token)[-len(self._closing) :]
                if self._tail == self._closing:
                    self._phase = _Phase.GRAMMAR
            elif self._phase is _Phase.START and token == self._opening:
                self._phase = _Phase.REASONING
            else:
                self._phase = _Phase.GRAMMAR
                self._matcher.consume_token(token)
                self._fed += 1

    def forced(self, most: int) -> list[int]:
        """See core.Constraint."""
        if self._phase is not _Phase.GRAMMAR or self._matcher.is_stopped():
            return []
        tokens, _ = self._tokenizer.tokenize_partial(self._matcher.compute_ff_bytes())
        return tokens[:most]

    def _mask(self) -> bytes:
        if self._phase is _Phase.REASONING:
            return b"\xff" * self._bytes
        mask = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()[: self._bytes]
        if not mask.strip(b"\0"):
            # A limit of llguidance was met on the way, or no token has the bytes that must come.
            self._stuck = True
            return self._with(self._eos, b"")
        if self._phase is _Phase.START and self._opening is not None:
            return self._with([self._opening], mask)
        return mask.ljust(self._bytes, b"\0")

    def _with(self, tokens: Collection[int], mask: bytes) -> bytes:
        """The mask with these tokens allowed too."""
        new = bytearray(mask.ljust(self._bytes, b"\0"))
        for token in tokens:
            new[token >> 3] |= 1 << (token & 7)
        return bytes(new)
