"""What a request asks for, whatever route it came by, and how it gets to the engine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from anyio import to_thread

from service.api.answers import Answer
from service.api.errors import ContextExceeded, ModelNotFound, ToolNotFound
from service.api.exchange import Exchange
from service.api.limits import Limits
from service.api.mailbox import Mailbox
from service.api.openings import Openings
from service.core import (
    BadRequest,
    Caller,
    Encoder,
    GenerationService,
    Grammar,
    Overloaded,
    Place,
    Prompt,
    Sampling,
)
from service.metrics import Metrics

BATCH_SHARE = 2
"""A request with many prompts has this part of rows and queue at a time: one of so many."""


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation as chat templates take it. tools: in the shape of OpenAI's chat route. options: further arguments of the
    template. strict: names of tools whose arguments are to be valid."""

    messages: Sequence[Mapping[str, object]]
    tools: Sequence[Mapping[str, object]] = ()
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    strict: frozenset[str] = frozenset()

    @property
    def user_messages(self) -> list[str]:
        """What the user said, in order."""
        return [str(turn["content"]) for turn in self.messages if turn["role"] == "user"]


@dataclass(frozen=True, slots=True)
class ForcedCalls:
    """The answer is to call tools. name: this one; None: any. several: as often as the model likes."""

    name: str | None
    several: bool


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt (a chat, a text, or token ids) and how it is to be answered. max_tokens: None for `default_max_tokens`, or for
    as many as the context holds where that is None too; 0: the prompt is read, and nothing is generated. split: reasoning and
    calls in the answer to a chat are split from its text. capped: a max_tokens that the context cannot hold is lowered instead
    of refused. bad_words: texts that are never said. prompt_field, max_tokens_field: their names in the request, for errors."""

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


@dataclass(frozen=True, slots=True)
class ModelNames:
    """The name of the served model, and other names that requests may use for it."""

    name: str
    aliases: Sequence[str] = ()

    @classmethod
    def of_target(cls, target: str, aliases: Sequence[str]) -> ModelNames:
        """Of a target as it is configured: a folder is known by its own name, and by its path as well."""
        folder = Path(os.path.abspath(Path(target).expanduser()))
        if not folder.is_dir():
            return cls(target, aliases)
        # In the hub's cache a folder is called by its revision: models--owner--name/snapshots/revision.
        kept = folder.parent.parent.name if folder.parent.name == "snapshots" else ""
        name = kept.removeprefix("models--").replace("--", "/") if kept.startswith("models--") else folder.name
        return cls(name or target, (*aliases, target))

    @property
    def all(self) -> list[str]:
        """Every name, the model's own first."""
        return list(dict.fromkeys((self.name, *self.aliases)))

    def check(self, name: str | None) -> None:
        """Raises NotFound with the list for a name that is not served."""
        if name is not None and name not in self.all:
            raise ModelNotFound(f"this server has no such model; it serves {', '.join(self.all)}")


@dataclass(frozen=True, slots=True)
class Frontend:
    """What the routes that generate have in common. defaults: sampling where a request to an OpenAI or Anthropic route says
    nothing. share: requests with other keys may use each other's cached prefixes and look-ups. openings: how conversations
    began. strict: fields that this server never heard of, and names of models that it does not serve, are refused."""

    service: GenerationService
    encoder: Encoder
    metrics: Metrics
    limits: Limits
    models: ModelNames
    defaults: Sampling
    mailbox: Mailbox
    share: bool = False
    strict: bool = False
    openings: Openings = field(default_factory=Openings)

    async def submit(
        self, asked: Sequence[Asked], caller: Caller, *, each: int = 1, live: bool, route: str
    ) -> tuple[Exchange, list[Answer]]:
        """Encode the prompts and queue answers to them, `each` to each of them, those of the first prompt first. Where they are
        more than a request may have in the queue (`_places`), others follow as answers end. A prompt that cannot fit by its
        bytes is not encoded, and none is where the queue has no place for answers to the first. live: events are wanted as they
        come, not only at an answer's end. route: the request's path. Raises BadRequest, Overloaded, Unavailable."""
        for one in asked:
            check_size(one, self.limits)
        self._check_count(each)
        seconds = self.limits.request_timeout
        exchange = Exchange(self.metrics, self.mailbox, seconds, live=live, per_prompt=each)
        with ExitStack() as held:
            places = self._places(len(asked) * each, each, held)
            prompts, made = await to_thread.run_sync(self._encoded, asked, each)
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
        """Raises BadRequest for more answers to a prompt than there are rows and places in the queue."""
        most = self.limits.max_answers
        if most is not None and each > most:
            raise BadRequest(
                f"{each} answers are more than the {most} that run and wait at once (engine.max_rows and "
                "engine.max_waiting)",
                field="n",
            )

    def _places(self, count: int, least: int, held: ExitStack) -> list[Place]:
        """Places in the queue for so many answers, or for those that a request of many prompts may have there at a time: half
        of rows and queue, so that others find places too. Raises Overloaded where there are not even `least`."""
        most = self.limits.max_answers
        wanted = count if most is None else min(count, max(least, most // BATCH_SHARE))
        places = [held.enter_context(self.service.reserve()) for _ in range(least)]
        # Where others have taken the rest, fewer are there at a time.
        with suppress(Overloaded):
            while len(places) < wanted:
                places.append(held.enter_context(self.service.reserve()))
        return places

    def _encoded(self, asked: Sequence[Asked], each: int) -> tuple[list[Prompt], list[Answer]]:
        """The prompts, and their answers before anything of them is there. Waits for the tokenizer."""
        prompts = [to_prompt(one, self.encoder, self.limits, self.openings, self.defaults) for one in asked]
        return prompts, [self._answer(one) for one in asked for _ in range(each)]

    def _answer(self, asked: Asked) -> Answer:
        chat = asked.prompt
        if not asked.split or not isinstance(chat, Chat):
            return Answer(None)
        return Answer(self.encoder.answer_reader(chat.tools, chat.options))


def _answer_number(prompt: Prompt, index: int) -> Prompt:
    """The prompt of the answer of this number: each has a seed and a constraint of its own."""
    if index == 0:
        return prompt
    sampling, constraint = prompt.sampling, prompt.constraint
    if sampling.seed is not None:
        sampling = replace(sampling, seed=(sampling.seed + index) % 2**63)
    return replace(prompt, sampling=sampling, constraint=constraint.copy() if constraint is not None else None)


def check_size(asked: Asked, limits: Limits) -> None:
    """Raises BadRequest for a prompt that cannot fit by its bytes, which costs nothing to count."""
    if limits.max_prompt_bytes is None:
        return
    match asked.prompt:
        case Chat(messages=turns):
            # Chat templates may trim messages, and drop system messages or earlier answers, so neither is counted.
            texts: Iterable[str] = (str(turn["content"]) for turn in turns if turn["role"] == "user")
        case str() as text:
            texts = [text]
        case _:
            return
    size = sum(len(text.strip().encode()) for text in texts)
    if size > limits.max_prompt_bytes:
        reason = f"{size} bytes cannot fit in a context of {limits.max_context} tokens"
        raise ContextExceeded(f"{asked.prompt_field} is too long: {reason}", field=asked.prompt_field)


def to_prompt(asked: Asked, encoder: Encoder, limits: Limits, openings: Openings, defaults: Sampling) -> Prompt:
    """What is asked as the engine takes it, encoded. defaults: the model's own sampling. Raises BadRequest naming the field
    that cannot be served."""
    wanted, name = asked.max_tokens, asked.max_tokens_field
    if wanted is not None and wanted > limits.max_tokens and not asked.capped:
        raise BadRequest(f"{name} is {limits.max_tokens} at most", field=name)
    grammar = _grammar(asked, encoder)
    options = asked.prompt.options if isinstance(asked.prompt, Chat) and asked.split else None
    tokens = _encode(asked, encoder)
    left = limits.max_context - len(tokens)
    if left < (1 if wanted is None else min(wanted, 1)):
        reason = f"{len(tokens)} tokens leave no room in a context of {limits.max_context}"
        raise ContextExceeded(f"{asked.prompt_field} is too long: {reason}", field=asked.prompt_field)
    if wanted is not None and wanted > left and not asked.capped:
        reason = f"{len(tokens)} prompt tokens leave room for {left} in a context of {limits.max_context}"
        raise ContextExceeded(f"{name} is too large: {reason}", field=name)
    most = min(asked.default_max_tokens or left if wanted is None else wanted, limits.max_tokens, left)
    sampling = replace(asked.sampling, max_tokens=most, bad_words=_bad_words(asked, encoder))
    if sampling.min_tokens > most:
        raise BadRequest(f"min_tokens is {most} at most here: the answer may have no more tokens", field="min_tokens")
    if any(token >= encoder.vocabulary for token in sampling.stop_token_ids):
        raise BadRequest(f"token ids are below {encoder.vocabulary}", field="stop_token_ids")
    return Prompt(
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
        # Nothing is drafted for an answer of one token, which is how a prompt's log-probabilities are asked for.
        num_draft_tokens=0 if asked.prompt_logprobs is not None and most <= 1 else asked.num_draft_tokens,
        constraint=encoder.constraint(grammar, options) if grammar is not None else None,
    )


def _bad_words(asked: Asked, encoder: Encoder) -> tuple[tuple[int, ...], ...]:
    """Token ids of what is never said. Raises BadRequest for a text without tokens."""
    found = [encoder.encode_word(word) for word in asked.bad_words]
    if not all(found):
        raise BadRequest("a text without tokens cannot be kept from being said", field=f"bad_words.{found.index(())}")
    # Without a logit a token is never said, nor is a text that has it.
    return tuple(dict.fromkeys(ids for each in found for ids in each if max(ids) < encoder.vocabulary))


def _grammar(asked: Asked, encoder: Encoder) -> Grammar | None:
    """Raises BadRequest where calls are forced that cannot be, or a format leaves no room for calls."""
    forced = asked.forced_calls
    if forced is None:
        if not isinstance(asked.prompt, Chat) or not asked.prompt.tools:
            return asked.grammar
        if asked.grammar is None:
            strict = asked.prompt.strict if encoder.binds_calls else ()
            return encoder.free_call_grammar(asked.prompt.tools, strict) if strict else None
        return encoder.call_grammar(asked.prompt.tools, several=True, otherwise=asked.grammar)
    if asked.grammar is not None:
        raise BadRequest("forced calls leave no room for another format", field="tool_choice")
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


def _encode(asked: Asked, encoder: Encoder) -> tuple[int, ...]:
    match asked.prompt:
        case Chat() as chat:
            return encoder.encode_chat(chat.messages, chat.tools, chat.options)
        case str() as text:
            return encoder.encode_text(text)
        case tokens:
            if any(not 0 <= token < encoder.vocabulary for token in tokens):
                raise BadRequest(f"token ids are below {encoder.vocabulary}", field=asked.prompt_field)
            return tuple(tokens)
