"""Log-probabilities of a prompt's own tokens, in vLLM's names."""

from __future__ import annotations

from service.api.answers import Answer
from service.api.openai.answer_schemas import PromptTokenLogprob, PromptTokens
from service.core import Encoder


def prompt_tokens(encoder: Encoder, answer: Answer, count: int) -> PromptTokens | None:
    """For each token of an answer's prompt, its log-probability and those of the `count` most likely tokens at its
    position. None if they were not computed."""
    if answer.prompt_logprobs is None:
        return None
    found: PromptTokens = []
    for rank, each in answer.prompt_logprobs:
        if each is None:
            found.append(None)
            continue
        # The token itself comes first, as in vLLM.
        likely = {each.token: (each.logprob, rank)}
        for place, (token, logprob) in enumerate(each.top[:count], 1):
            likely.setdefault(token, (logprob, place))
        found.append(
            {
                str(token): PromptTokenLogprob(
                    logprob=logprob, rank=place, decoded_token=encoder.token_bytes(token).decode(errors="replace")
                )
                for token, (logprob, place) in likely.items()
            }
        )
    return found
