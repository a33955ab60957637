"""What a request asks for, independent of its route, and how it reaches the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from service.api.answers import Answer
from service.api.errors import ContextExceeded, ModelNotFound, ToolNotFound
from service.api.exchange import Exchange
from service.api.limits import Limits
from service.api.mailbox import Mailbox
from service.api.openings import Openings
from service.api.replies import Replies
from service.api.threads import COMPILING, ENCODING
from service.core import (
    NOTHING_HIDDEN,
    BadRequest,
    Caller,
    ChatEnd,
    EncodedChat,
    Encoder,
    GenerationService,
    Grammar,
    HiddenTokens,
    Overloaded,
    Place,
    Prompt,
    Reasoning,
    Sampling,
)
from service.metrics import Metrics

BATCH_SHARE = 2
"""A request with many prompts uses 1 / BATCH_SHARE of rows and queue at a time."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation in the form chat templates expect. tools: in the shape of OpenAI's chat route. options: further
    template arguments. strict: names of tools whose arguments must be valid. end: how the prompt ends."""

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]] = ()
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    strict: frozenset[str] = frozenset()
    end: ChatEnd = ChatEnd.NEW_TURN

    @property
    def user_messages(self) -> list[str]:
        """The user's messages, in order."""
        return [str(turn["content"]) for turn in self.messages if turn["role"] == "user"]


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """The answer must call tools. name: this one; None: any. several: more than one call is allowed."""

    name: str | None
    several: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt (a chat, a text, or token ids) and the options for its answer.

    max_tokens: None for `default_max_tokens`, or up to the context length if that is None too; 0: the prompt is read
    and nothing is generated. split: reasoning and calls are separated from the text of a chat's answer. capped: a
    max_tokens beyond the context is lowered even if the server is strict. bad_words: texts that must not be generated.
    prediction: the expected answer. show_special: special tokens are part of the text. prompt_field, max_tokens_field:
    their names in the request, for errors.
    """

    prompt: Chat | str | Sequence[int]
    sampling: Sampling
    max_tokens: int | None
    default_max_tokens: int | None = None
    capped: bool = False
    prompt_field: str = "messages"
    max_tokens_field: str = "max_tokens"
    domain: str | None = None
    client: str | None = None
    store: bool = True
    logprobs: int | None = None
    logprob_of_end: bool = False
    prompt_logprobs: int | None = None
    num_draft_tokens: int | None = None
    grammar: Grammar | None = None
    forced_calls: ForcedCalls | None = None
    split: bool = True
    bad_words: Sequence[str] = ()
    prediction: str = ""
    show_special: bool = False

    @property
    def constrained(self) -> bool:
        """Whether its answer may have to follow a grammar."""
        strict = isinstance(self.prompt, Chat) and bool(self.prompt.strict)
        return self.grammar is not None or self.forced_calls is not None or strict


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The name of the served model and its aliases in requests."""

    name: str
    aliases: Sequence[str] = ()

    @classmethod
    def of_target(cls, target: str, aliases: Sequence[str]) -> ModelNames:
        """Names for a configured target: a folder is known by its own name and by its path. Aliases come first, and the
        first one becomes the model's name."""
        folder = Path(os.path.abspath(Path(target).expanduser()))
        if not folder.is_dir():
            return cls._of(*aliases, target)
        # In the hub's cache a folder is named after its revision: models--owner--name/snapshots/revision.
        kept = folder.parent.parent.name if folder.parent.name == "snapshots" else ""
        name = kept.removeprefix("models--").replace("--", "/") if kept.startswith("models--") else folder.name
        return cls._of(*aliases, name or target, target)

    @classmethod
    def _of(cls, first: str, *others: str) -> ModelNames:
        return cls(first, others)

    @property
    def all(self) -> list[str]:
        """Every name, the model's main name first."""
        return list(dict.fromkeys((self.name, *self.aliases)))

    def check(self, name: str | None) -> None:
        """Raises NotFound, listing the served names, for any other name."""
        if name is not None and name not in self.all:
            raise ModelNotFound(f"this server has no such model; it serves {', '.join(self.all)}")


@dataclass(frozen=True, slots=True)
class Frontend:
    """Shared state of the routes that generate. defaults: sampling for OpenAI and Anthropic requests that leave it
    open. share: requests with different keys may share cached prefixes and prompt lookup. openings: how conversations
    began. shows_draft_counts: whether a caller's answers contain the numbers of drafted and accepted tokens. strict:
    unknown fields and model names are refused. replies: replies that later requests may refer to."""

    service: GenerationService
    encoder: Encoder
    metrics: Metrics
    limits: Limits
    models: ModelNames
    defaults: Sampling
    mailbox: Mailbox
    share: bool = False
    shows_draft_counts: Callable[[Caller], bool] = lambda caller: True
    strict: bool = False
    openings: Openings = field(default_factory=Openings)
    replies: Replies = field(default_factory=lambda: Replies(0))

    async def submit(
        self, asked: Sequence[Asked], caller: Caller, *, each: int = 1, live: bool, route: str
    ) -> tuple[Exchange, list[Answer]]:
        """Encodes the prompts and queues `each` answers to each of them, those of the first prompt first.

        Answers beyond a request's limit in the queue (`_places`) follow as others end. A prompt that cannot fit by its
        byte count is not encoded, and no prompt is if the queue is too full for the answers to the first one. live:
        events are wanted as they arrive, not only at an answer's end. route: the request's path. Raises BadRequest,
        Overloaded, Unavailable.
        """
        for one in asked:
            check_size(one, self.limits)
        self._check_count(each)
        seconds = self.limits.request_timeout
        exchange = Exchange(self.metrics, self.mailbox, seconds, live=live, per_prompt=each)
        exchange.draft_counts = self.shows_draft_counts(caller)
        with ExitStack() as held:
            places = self._places(len(asked) * each, each, held)
            encoded, made = await ENCODING.run(self._encoded, asked, each)
            prompts = [prompt for prompt, _ in encoded]
            exchange.ignored += _lowered(asked, prompts)
            if any(one.constrained for one in asked):
                # On separate threads: a grammar may take seconds, and other routes need their threads in the meantime.
                prompts = await COMPILING.run(self._constrained, encoded, asked, exchange)
            salt = "" if self.share or caller.key is None else caller.key
            prompts = [replace(prompt, api_key=caller.key, cache_salt=salt) for prompt in prompts]
            several = [_answer_number(prompt, i) for prompt in prompts for i in range(each)]
            try:
                exchange.submit(self.service, several, places, route=route)
            except BaseException:
                exchange.close()
                raise
        return exchange, made

    def _check_count(self, each: int) -> None:
        """Raises BadRequest for more answers to a prompt than rows and queue can hold."""
        most = self.limits.max_answers
        if most is not None and each > most:
            raise BadRequest(
                f"{each} answers exceed the {most} that can run and wait at once (engine.max_rows and "
                "engine.max_waiting)",
                field="n",
            )

    def _places(self, count: int, least: int, held: ExitStack) -> list[Place]:
        """Queue slots for `count` answers, but at most half of rows and queue for a request with many prompts, so that
        others find slots too. Raises Overloaded if fewer than `least` are free."""
        most = self.limits.max_answers
        wanted = count if most is None else min(count, max(least, most // BATCH_SHARE))
        places = [held.enter_context(self.service.reserve()) for _ in range(least)]
        # If others have taken the rest, fewer answers run at a time.
        with suppress(Overloaded):
            while len(places) < wanted:
                places.append(held.enter_context(self.service.reserve()))
        return places

    def _encoded(self, asked: Sequence[Asked], each: int) -> tuple[list[tuple[Prompt, Reasoning]], list[Answer]]:
        """The prompts with their state of reasoning, and their empty answers. Waits for the tokenizer."""
        found = [
            to_prompt(one, self.encoder, self.limits, self.openings, self.defaults, strict=self.strict) for one in asked
        ]
        answers = [self._answer(one, how) for one, (_, how) in zip(asked, found, strict=True) for _ in range(each)]
        return found, answers

    def _constrained(
        self, encoded: Sequence[tuple[Prompt, Reasoning]], asked: Sequence[Asked], exchange: Exchange
    ) -> list[Prompt]:
        """The same prompts with their constraints, compiled if they are not cached. Raises BadRequest."""
        found: list[Prompt] = []
        names: dict[str, None] = {}
        for (prompt, reasoning), one in zip(encoded, asked, strict=True):
            grammar = _grammar(one, self.encoder)
            if grammar is None:
                found.append(prompt)
                continue
            constraint = self.encoder.constraint(grammar, reasoning)
            found.append(replace(prompt, constraint=constraint))
            names |= dict.fromkeys(f"{grammar.field}.{name}" for name in constraint.unenforced)
        if names and self.strict:
            raise BadRequest(f"this server is strict and cannot enforce {', '.join(names)}", field=next(iter(names)))
        exchange.ignored += names
        return found

    def _answer(self, asked: Asked, reasoning: Reasoning) -> Answer:
        chat = asked.prompt
        if not asked.split or not isinstance(chat, Chat):
            return Answer(None)
        return Answer(self.encoder.answer_reader(chat.tools, reasoning))


def _lowered(asked: Sequence[Asked], prompts: Sequence[Prompt]) -> list[str]:
    """Names of fields whose requested answer length was lowered to the available room."""
    return [
        one.max_tokens_field
        for one, prompt in zip(asked, prompts, strict=True)
        if one.max_tokens is not None and one.max_tokens > prompt.sampling.max_tokens
    ]


def _answer_number(prompt: Prompt, index: int) -> Prompt:
    """The prompt for the answer with this number, which has its own seed and constraint."""
    if index == 0:
        return prompt
    sampling, constraint = prompt.sampling, prompt.constraint
    if sampling.seed is not None:
        sampling = replace(sampling, seed=(sampling.seed + index) % 2**63)
    return replace(prompt, sampling=sampling, constraint=constraint.copy() if constraint is not None else None)


def check_size(asked: Asked, limits: Limits) -> None:
    """Raises ContextExceeded for a prompt that cannot fit by its byte count, which is cheap to determine."""
    if limits.max_prompt_bytes is None:
        return
    match asked.prompt:
        case Chat(messages=turns):
            # Chat templates may trim messages and drop system messages or earlier answers, so neither is counted.
            texts: Iterable[str] = (str(turn["content"]) for turn in turns if turn["role"] == "user")
        case str() as text:
            texts = [text]
        case _:
            return
    size = sum(len(text.strip().encode()) for text in texts)
    if size > limits.max_prompt_bytes:
        reason = f"{size} bytes cannot fit in a context of {limits.max_context} tokens"
        raise _too_long(asked, reason, -(-size * limits.max_context // limits.max_prompt_bytes), limits)


def _too_long(asked: Asked, reason: str, tokens: int, limits: Limits) -> ContextExceeded:
    """tokens: minimum length of the prompt. A prompt that fills the context leaves no room for an answer."""
    message = f"{asked.prompt_field} is too long: {reason}"
    limit = min(limits.max_context, tokens - 1)
    return ContextExceeded(message, asked.prompt_field, prompt_tokens=tokens, limit=limit)


def to_prompt(
    asked: Asked, encoder: Encoder, limits: Limits, openings: Openings, defaults: Sampling, *, strict: bool = False
) -> tuple[Prompt, Reasoning]:
    """Encodes a request for the engine, without its constraint, and returns how its answer begins. defaults: the
    model's own sampling. strict: a max_tokens beyond the context is refused instead of lowered. Raises BadRequest
    naming the field that cannot be served."""
    wanted, name = asked.max_tokens, asked.max_tokens_field
    refused = strict and not asked.capped
    if wanted is not None and wanted > limits.max_tokens and refused:
        raise BadRequest(f"{name} must be at most {limits.max_tokens}", field=name)
    encoded = _encode(asked, encoder)
    tokens, reasoning = encoded.tokens, encoded.reasoning if asked.split else Reasoning.CLOSED
    left = limits.max_context - len(tokens)
    if left < (1 if wanted is None else min(wanted, 1)):
        reason = f"{len(tokens)} tokens leave no room in a context of {limits.max_context}"
        raise _too_long(asked, reason, len(tokens), limits)
    if wanted is not None and wanted > left and refused:
        reason = f"{len(tokens)} prompt tokens leave room for {left} in a context of {limits.max_context}"
        raise ContextExceeded(f"{name} is too large: {reason}", field=name)
    most = min(asked.default_max_tokens or left if wanted is None else wanted, limits.max_tokens, left)
    sampling = replace(asked.sampling, max_tokens=most, bad_words=_bad_words(asked, encoder))
    if sampling.min_tokens > most:
        raise BadRequest(
            f"min_tokens must be at most {most} here, the maximum length of the answer", field="min_tokens"
        )
    if any(token >= encoder.vocabulary for token in sampling.stop_token_ids):
        raise BadRequest(f"token ids must be below {encoder.vocabulary}", field="stop_token_ids")
    prompt = Prompt(
        tokens,
        sampling,
        domain=asked.domain,
        client=asked.client,
        store=asked.store,
        bent=sampling.bends(defaults),
        first_user=_first_user(asked, openings),
        logprobs=asked.logprobs,
        logprob_of_end=asked.logprob_of_end,
        prompt_logprobs=asked.prompt_logprobs,
        # An answer of one token is how clients request a prompt's log-probabilities; drafting would be useless.
        num_draft_tokens=0 if asked.prompt_logprobs is not None and most <= 1 else asked.num_draft_tokens,
        # The answer cannot be longer than the context.
        prediction=encoder.encode_answer(asked.prediction[: limits.max_prompt_bytes]) if asked.prediction else (),
        hidden=_hidden(asked, encoder),
    )
    return prompt, reasoning


def _hidden(asked: Asked, encoder: Encoder) -> HiddenTokens:
    if asked.show_special:
        return NOTHING_HIDDEN
    chat = asked.prompt if isinstance(asked.prompt, Chat) and asked.split else None
    return encoder.hidden_tokens(
        split=chat is not None, tools=chat is not None and bool(chat.tools), stop=asked.sampling.stop
    )


def _bad_words(asked: Asked, encoder: Encoder) -> tuple[tuple[int, ...], ...]:
    """Token ids of the texts that must not be generated. Raises BadRequest for a text without tokens."""
    found = [encoder.encode_word(word) for word in asked.bad_words]
    if not all(found):
        raise BadRequest("a text without tokens cannot be excluded", field=f"bad_words.{found.index(())}")
    # A token without a logit is never generated, nor is a text that contains it.
    return tuple(dict.fromkeys(ids for each in found for ids in each if max(ids) < encoder.vocabulary))


def _grammar(asked: Asked, encoder: Encoder) -> Grammar | None:
    """Raises BadRequest when forced calls are impossible, or when a format excludes calls."""
    forced = asked.forced_calls
    if forced is None:
        if not isinstance(asked.prompt, Chat) or not asked.prompt.tools:
            return asked.grammar
        if asked.grammar is None:
            strict = asked.prompt.strict if encoder.binds_calls else ()
            return encoder.free_call_grammar(asked.prompt.tools, strict) if strict else None
        return encoder.call_grammar(asked.prompt.tools, several=True, otherwise=asked.grammar)
    if asked.grammar is not None:
        raise BadRequest("forced calls cannot be combined with another format", field="tool_choice")
    tools = asked.prompt.tools if isinstance(asked.prompt, Chat) else ()
    if forced.name is not None:
        tools = [tool for tool in tools if _name(tool) == forced.name]
    if not tools:
        raise ToolNotFound("the tool that must be called is not among the tools")
    return encoder.call_grammar(tools, several=forced.several)


def _name(tool: Mapping[str, object]) -> object:
    function = tool["function"]
    return function["name"] if isinstance(function, dict) else None


def _first_user(asked: Asked, openings: Openings) -> str:
    match asked.prompt:
        case Chat() as chat:
            return openings.distinguishing(chat.user_messages)
        case str() as text:
            return text
        case _:
            return ""


def _encode(asked: Asked, encoder: Encoder) -> EncodedChat:
    match asked.prompt:
        case Chat() as chat:
            encoded = encode_chat(chat, encoder, asked.prompt_field)
            _check_known(encoded.tokens, asked, encoder)
            return encoded
        case str() as text:
            encoded = EncodedChat(encoder.encode_text(text))
            _check_known(encoded.tokens, asked, encoder)
            return encoded
        case tokens:
            if any(not 0 <= token < encoder.vocabulary for token in tokens):
                raise BadRequest(f"token ids must be below {encoder.vocabulary}", field=asked.prompt_field)
            return EncodedChat(tuple(tokens))


def _check_known(tokens: tuple[int, ...], asked: Asked, encoder: Encoder) -> None:
    """Raises BadRequest for a token that the model lacks: some tokenizers have more tokens than their model."""
    for token in tokens:
        if token >= encoder.vocabulary:
            name = encoder.token_bytes(token).decode("utf-8", "replace")
            raise BadRequest(
                f"{asked.prompt_field} has the token {name} (id {token}), which the model does not have: its ids are below "
                f"{encoder.vocabulary}",
                field=asked.prompt_field,
            )


def encode_chat(chat: Chat, encoder: Encoder, field: str = "messages") -> EncodedChat:
    """Encodes the prompt of a chat. field: the name of the messages in the request, for errors. Raises BadRequest."""
    try:
        return encoder.encode_chat(chat.messages, chat.tools, chat.options, chat.end)
    except BadRequest as error:
        if error.field == "messages":
            error.field = field
        raise
