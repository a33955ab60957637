"""Grammars that answers must follow, compiled by llguidance into the tokens allowed next."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Any, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from mlx_lm.tokenizer_utils import TokenizerWrapper
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from service.core import AnswerGrammar, BadRequest, Grammar, GrammarKind, LibraryPanic, panics_as_errors
from service.models.grammar_schemas import MAX_MERGES, all_schemas, merged_patterns, readable, unenforced
from service.models.tokens import TokenTable, steps, token_table

MAX_CHARS = 2**20
"""Maximum characters of a grammar or schema."""
COMPILED = 64
"""Number of grammars that stay compiled."""
LIMITS = LLParserLimits(
    initial_lexer_fuel=300_000,
    step_lexer_fuel=50_000,
    step_max_items=10_000,
    max_items_in_row=500,
    max_lexer_states=50_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
"""A tenth to a half of llguidance's defaults: a mask takes at most 4 ms, because every row of a batch waits for it."""
PROBED = 16
"""Tokens of an answer that are tried when a grammar is compiled, because some grammars exceed their limits only then."""
MOST_MULTIPLES = 20_000
"""Limit for the sum of all `multipleOf` in a grammar. Each remainder is a state, and a million of them take seconds."""
STACK_BYTES = 2**28
"""Stack of a compiling thread. llguidance recurses along chains of references, and an overflow would end the process."""
COMPILE_SECONDS, COMPILING, MAX_ABANDONED = 10.0, 2, 8
"""Time limit for compiling a grammar, maximum concurrent compilations, and maximum abandoned ones. A compilation cannot be
interrupted: after the time limit it continues in the background and frees its slot. While too many are abandoned, nothing else
is compiled."""
JSON_STYLE: dict[str, Any] = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "lenient": True,
}
"""JSON as `json.dumps` writes it, so that forced text can be proposed without a draft. lenient: formats unknown to llguidance
are annotations, and keywords that it cannot enforce are ignored; `TokenConstraint.unenforced` lists them."""


def compiled_text(grammar: Grammar) -> str:
    """A grammar in llguidance's form. Raises BadRequest for an invalid schema or list."""
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return LLMatcher.grammar_from_json_schema(grammar.source, overrides=cast("Any", JSON_STYLE))
            case GrammarKind.CHOICE:
                return grammar_from("lark", _choices(json.loads(grammar.source)))
            case GrammarKind.REGEX:
                return grammar_from("regex", grammar.source)
            case GrammarKind.LARK:
                return grammar_from("lark", grammar.source)
    except ValueError as error:
        raise BadRequest(f"it cannot be compiled: {error}", field=grammar.field) from error


def _choices(choices: Sequence[str]) -> str:
    """The Lark grammar of one of these texts, as a single terminal, because the parser's rows hold few alternatives."""
    texts = [json.dumps(choice, ensure_ascii=False) for choice in dict.fromkeys(choices) if choice]
    ways = [*(["CHOICE"] if texts else []), *(['""'] if "" in choices else [])]
    return "\n".join([f"start: {' | '.join(ways)}", *([f"CHOICE: {' | '.join(texts)}"] if texts else [])])


class Grammars:
    """Compiles grammars for one tokenizer. vocabulary: width of the target's logits. eos: tokens that end an answer.
    Thread-safe and slow: not for the engine thread."""

    def __init__(self, tokenizer: TokenizerWrapper, vocabulary: int, eos: Collection[int]) -> None:
        self._source = tokenizer
        self._vocabulary = vocabulary
        self._eos = frozenset(token for token in eos if token < vocabulary)
        self._lock = threading.Lock()
        self._compiling = threading.Semaphore(COMPILING)
        self._abandoned = 0
        """Grammars that continue compiling after their time limit."""
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, tuple[LLMatcher, tuple[str, ...]]] = OrderedDict()
        """By text: a matcher in its initial state, and keywords that it does not enforce."""

    def constraint(self, grammar: Grammar, opening: int | None = None, closing: Sequence[int] = ()) -> TokenConstraint:
        """A constraint that keeps one answer within a grammar. closing: tokens that end the preceding reasoning, which is
        unconstrained. opening: the token that begins the reasoning, if the model may skip it; None: reasoning has already
        begun, or there is none (closing is empty). Raises BadRequest for a grammar that is too large or cannot be compiled."""
        if len(grammar.source) > MAX_CHARS:
            raise BadRequest(f"it is longer than {MAX_CHARS} characters", field=grammar.field)
        return self.of_answer(AnswerGrammar(compiled_text(grammar), opening, tuple(closing)), grammar.field)

    def of_answer(self, grammar: AnswerGrammar, field: str = "grammar") -> TokenConstraint:
        """The same for a stored grammar. Raises BadRequest if it cannot be compiled."""
        with self._lock:
            tokenizer = self._tokenizer = self._tokenizer or self._make_tokenizer(field)
            known = self._compiled.get(grammar.text)
        # Outside the lock, so that others can use compiled grammars meanwhile.
        matcher, unenforced = known or self._compile_apart(tokenizer, grammar.text, field)
        with self._lock:
            self._compiled[grammar.text] = matcher, unenforced
            self._compiled.move_to_end(grammar.text)
            if len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
            copy = matcher.deep_copy()
        return TokenConstraint(tokenizer, copy, grammar, self._vocabulary, self._eos, unenforced)

    def forget(self) -> None:
        """Drop compiled grammars, because schemas and tools are clients' texts."""
        with self._lock:
            self._compiled.clear()

    def _compile_apart(self, tokenizer: LLTokenizer, grammar: str, field: str) -> tuple[LLMatcher, tuple[str, ...]]:
        """Compile on a thread with STACK_BYTES, within COMPILE_SECONDS. Raises BadRequest."""
        if (multiples := _multiples(grammar)) > MOST_MULTIPLES:
            reason = f"its multipleOf add up to {multiples:.0f}, more than {MOST_MULTIPLES}"
            raise BadRequest(f"it cannot be compiled: {reason}", field=field)
        if self._abandoned >= MAX_ABANDONED or not self._compiling.acquire(timeout=COMPILE_SECONDS):
            raise BadRequest("it cannot be compiled now: other grammars take too long", field=field)
        made: Future[tuple[LLMatcher, tuple[str, ...]]] = Future()
        abandoned = False

        def work() -> None:
            try:
                with panics_as_errors():
                    made.set_result(_compile(tokenizer, grammar, field))
            except BaseException as error:  # noqa: BLE001  (raised by the waiting thread)
                made.set_exception(error)
            finally:
                with self._lock:
                    if abandoned:
                        self._abandoned -= 1
                    else:
                        self._compiling.release()

        with _starting:
            before = threading.stack_size(STACK_BYTES)
            try:
                threading.Thread(target=work, name="redraft-grammar", daemon=True).start()
            except RuntimeError:  # no memory for its stack
                self._compiling.release()
                raise
            finally:
                threading.stack_size(before)
        try:
            return made.result(COMPILE_SECONDS)
        except TimeoutError:
            with self._lock:
                # It may have ended since the time-out and released its slot.
                if not made.done():
                    abandoned = True
                    self._abandoned += 1
                    self._compiling.release()
            raise BadRequest(f"it cannot be compiled within {COMPILE_SECONDS:.0f} s", field=field) from None

    def _make_tokenizer(self, field: str) -> LLTokenizer:
        inner = getattr(self._source, "_tokenizer", None)
        if isinstance(inner, PreTrainedTokenizerFast) and self._eos:
            table = token_table(self._source)
            if table.joins:
                parts: dict[str, Any] = json.loads(inner.backend_tokenizer.to_str())
                with panics_as_errors():
                    tokens = _GrammarTokens(table, parts, self._vocabulary, sorted(self._eos))
                    tokenizer = LLTokenizer(cast("Any", tokens), eos_token=tokens.eos)
                tokens.greedy = tokenizer.greedy_tokenize
                return tokenizer
        raise BadRequest("this model's tokenizer has no form that grammars can use", field=field)


class _GrammarTokens:
    """The vocabulary in llguidance's form, with the interface of its TokenizerWrapper.

    llguidance can read tokenizer.json itself, but it panics if ids have gaps, and its text may contain special tokens: it
    forces the token `<tool_call>` where a grammar wants these letters, and then refuses it.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, table: TokenTable, parts: dict[str, Any], vocabulary: int, eos: list[int]) -> None:
        """parts: tokenizer.json, which is changed. vocabulary: width of the target's logits."""
        # Ids without a token have no bytes, which no text of a grammar matches. The model may lack the tokenizer's last ids.
        self.tokens = [*table.bytes[:vocabulary], *[b""] * (vocabulary - len(table))]
        self.special_token_ids = sorted(id for id in table.special.values() if id < vocabulary)
        self.eos, self.eos_token_id = eos, eos[0]
        for token in parts["added_tokens"]:
            token["special"] = token["content"] in table.special
        # Forced text must become tokens of exactly its bytes, so nothing may be added to it or composed.
        replaced = [step for step in steps(parts["normalizer"]) if step["type"] == "Replace"]
        parts["normalizer"] = {"type": "Sequence", "normalizers": replaced} if replaced else None
        for step in steps(parts["pre_tokenizer"]):
            step |= {"add_prefix_space": False} if "add_prefix_space" in step else {}
            step |= {"prepend_scheme": "never"} if "prepend_scheme" in step else {}
        parts["truncation"] = parts["padding"] = parts["post_processor"] = None
        self._tokenizer = Tokenizer.from_str(json.dumps(parts))
        self._tokenizer.encode_special_tokens = True
        self._special = frozenset(self.special_token_ids)
        self.greedy: Callable[[str], list[int]] | None = None
        """llguidance's tokenization, by the longest token at each position; None while its tokenizer is built."""

    def __call__(self, text: str) -> list[int]:
        """Token ids of exactly this text, in which special tokens count as ordinary letters."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        exact = (
            all(id < len(self.tokens) for id in ids)
            and b"".join(self.tokens[id] for id in ids) == text.encode()
            and self._special.isdisjoint(ids)
        )
        return ids if exact or self.greedy is None else self.greedy(text)


_starting = threading.Lock()
"""The stack size for new threads is a setting of the whole process."""


def _multiples(grammar: str) -> float:
    """The sum of all `multipleOf` in a grammar's schemas."""
    found = (schema.get("multipleOf") for schema in all_schemas(grammar))
    return sum((abs(multiple) for multiple in found if isinstance(multiple, int | float)), 0.0)


def _compile(tokenizer: LLTokenizer, grammar: str, field: str) -> tuple[LLMatcher, tuple[str, ...]]:
    """A matcher, and the keywords of schemas that it does not enforce. Raises BadRequest."""

    def compiled(text: str) -> LLMatcher:
        return LLMatcher(tokenizer, text, limits=LIMITS, log_level=0)

    dropped: tuple[str, ...] = ()
    matcher = compiled(grammar)
    if matcher.is_error():
        grammar, dropped = readable(grammar, lambda regex: compiled(grammar_from("regex", regex)).get_error())
        matcher = compiled(grammar)
    for _ in range(MAX_MERGES):
        merged = merged_patterns(grammar, matcher.get_error()) if matcher.is_error() else None
        if merged is None:
            break
        grammar = merged
        matcher = compiled(grammar)
    tried = matcher.deep_copy()
    for _ in range(PROBED):
        if tried.is_error() or tried.is_stopped():
            break
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(tried.compute_bitmask(), np.uint8), bitorder="little"))
        if len(allowed):
            tried.consume_token(int(allowed[len(allowed) // 2]))
    if tried.is_error():
        raise BadRequest(f"it cannot be compiled: {_reason(tried.get_error())}", field=field)
    names = {*dropped, *unenforced(grammar, matcher.get_grammar_warnings())}
    return matcher, tuple(sorted(names))


def _reason(error: str) -> str:
    """One line of llguidance's error. The cause of a regex error comes last, after lines that show its position."""
    first, *others = error.splitlines()
    said = next((line.removeprefix("error: ") for line in others if line.startswith("error: ")), "")
    return f"{first} {said}" if said and first.endswith(":") else first


class _Phase(Enum):
    """The phase of an answer. START: it may begin to reason, or begin the constrained text."""

    START = "start"
    REASONING = "reasoning"
    GRAMMAR = "grammar"


class TokenConstraint:
    """core.Constraint by llguidance."""

    def __init__(
        self,
        tokenizer: LLTokenizer,
        matcher: LLMatcher,
        grammar: AnswerGrammar,
        vocabulary: int,
        eos: frozenset[int],
        unenforced: tuple[str, ...] = (),
    ) -> None:
        self.grammar = grammar
        self.unenforced = unenforced
        self._tokenizer = tokenizer
        self._matcher = matcher
        self._bytes = -(-vocabulary // 32) * 4
        self._eos = eos
        self._opening = grammar.opening
        self._closing = grammar.closing
        self._phase = _Phase.GRAMMAR
        if grammar.closing:
            self._phase = _Phase.REASONING if grammar.opening is None else _Phase.START
        self._tail: tuple[int, ...] = ()
        """The last tokens of the reasoning, as many as `closing` has."""
        free = bytearray(b"\xff" * self._bytes)
        for token in eos:
            free[token >> 3] &= ~(1 << (token & 7))
        self._reasoning = bytes(free)
        """The mask during reasoning, which must end before the answer does."""
        self._fed: list[int] = []
        """Tokens that the grammar has consumed."""
        self._stuck = False
        self._pristine = matcher.deep_copy()

    def copy(self) -> TokenConstraint:
        """See core.Constraint."""
        matcher, width = self._matcher.deep_copy(), self._bytes * 8
        matcher.reset()
        return TokenConstraint(self._tokenizer, matcher, self.grammar, width, self._eos, self.unenforced)

    @property
    def failed(self) -> bool:
        """See core.Constraint."""
        return self._stuck or self._matcher.is_error()

    def masks(self, proposed: Sequence[int]) -> list[bytes]:
        """See core.Constraint."""
        masks, before = [self._mask()], (self._phase, self._tail, self._stuck, len(self._fed))
        for token in proposed:
            if token in self._eos or not masks[-1][token >> 3] >> (token & 7) & 1:
                break
            self.advance([token])
            masks.append(self._mask())
        self._phase, self._tail, stuck, fed = before
        if self._matcher.is_error() and not stuck:
            # A proposal hit a limit, and the error is permanent: restart with the tokens of the answer.
            self._matcher = self._pristine.deep_copy()
            self._matcher.consume_tokens(self._fed[:fed])
        else:
            self._matcher.rollback(len(self._fed) - fed)
        del self._fed[fed:]
        self._stuck = stuck
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
                self._fed.append(token)

    def forced(self, most: int) -> list[int]:
        """See core.Constraint."""
        if self._phase is not _Phase.GRAMMAR or self._matcher.is_stopped():
            return []
        try:
            with panics_as_errors():
                tokens, _ = self._tokenizer.tokenize_partial(self._matcher.compute_ff_bytes())
        except LibraryPanic:
            # Forced tokens are only proposals, and the engine thread must continue.
            return []
        return tokens[:most]

    def _mask(self) -> bytes:
        if self._phase is _Phase.REASONING:
            return self._reasoning
        mask = b"" if self._matcher.is_error() else self._matcher.compute_bitmask()[: self._bytes]
        if not mask.strip(b"\0"):
            # llguidance hit a limit, or no token has the required bytes.
            self._stuck = True
            return self._with(self._eos, b"")
        if self._phase is _Phase.START and self._opening is not None:
            return self._with([self._opening], mask)
        return mask.ljust(self._bytes, b"\0")

    def _with(self, tokens: Collection[int], mask: bytes) -> bytes:
        """The mask with these tokens also allowed."""
        new = bytearray(mask.ljust(self._bytes, b"\0"))
        for token in tokens:
            new[token >> 3] |= 1 << (token & 7)
        return bytes(new)
