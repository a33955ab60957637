"""Log-probabilities in the shape of OpenAI's completion route, for an answer's tokens and for an echoed prompt."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from service.api.openai.answer_schemas import CompletionLogprobs
from service.core import Encoder, PromptLogprobs, TokenLogprobs


def completion_logprobs(encoder: Encoder, logprobs: Sequence[TokenLogprobs], offset: int) -> CompletionLogprobs:
    """The log-probabilities of output tokens, in the form shown to clients. offset: characters of text before them."""
    tokens = [_text(encoder, each.token) for each in logprobs]
    offsets = [offset]
    for token in tokens:
        offsets.append(offsets[-1] + len(token))
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[each.logprob for each in logprobs],
        top_logprobs=[_likely(encoder, each, len(each.top)) for each in logprobs],
        text_offset=offsets[:-1],
    )


def echoed_logprobs(encoder: Encoder, prompt: PromptLogprobs, text: str, count: int) -> CompletionLogprobs:
    """The same for a prompt's tokens. text: the echoed text. count: number of most likely tokens sent per position, in
    addition to the token itself."""
    known = [each for _, each in prompt]
    return CompletionLogprobs(
        tokens=[_text(encoder, token) for token in prompt.tokens],
        token_logprobs=[None if each is None else each.logprob for each in known],
        top_logprobs=[None if each is None else _likely(encoder, each, count) for each in known],
        text_offset=_offsets(encoder, prompt.tokens, text),
    )


def prompt_text(encoder: Encoder, prompt: str | Sequence[int]) -> str:
    """A prompt as text."""
    if isinstance(prompt, str):
        return prompt
    return b"".join(map(encoder.token_bytes, prompt)).decode(errors="replace")


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The two concatenated."""
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def _offsets(encoder: Encoder, tokens: Sequence[int], text: str) -> list[int]:
    """The offset of each token in a text that ends with them; for a token inside a character, the offset of the
    character. Tokens that the tokenizer adds before a text, such as a begin token, have no width."""
    decoder, offsets, length = codecs.getincrementaldecoder("utf-8")("replace"), list[int](), 0
    for token in tokens:
        offsets.append(length)
        length += len(decoder.decode(encoder.token_bytes(token)))
    length += len(decoder.decode(b"", final=True))
    before = max(length - len(text), 0)
    return [min(max(offset - before, 0), len(text)) for offset in offsets]


def _text(encoder: Encoder, token: int) -> str:
    return encoder.token_bytes(token).decode(errors="replace")


def _likely(encoder: Encoder, each: TokenLogprobs, count: int) -> dict[str, float]:
    """The log-probabilities of the most likely tokens at a position and of the actual one. For tokens with the same
    text, the most likely one's."""
    found: dict[str, float] = {}
    for token, logprob in [*each.top[:count], (each.token, each.logprob)]:
        key = _key(encoder, token)
        found[key] = max(logprob, found.get(key, logprob))
    return found


def _key(encoder: Encoder, token: int) -> str:
    """A token's text or, if it is not a whole character, its bytes in OpenAI's notation."""
    raw = encoder.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
