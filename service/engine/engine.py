"""What the engine thread runs: a decoder, the base draft, and the limits and text functions of the models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from service.core import BadRequest, Memory, Prompt, Provenance
from service.engine import device
from service.engine.adapters import Draft
from service.engine.decoder import Decoder
from service.engine.request import Detokenizer, Request, TextStream


@dataclass(frozen=True, slots=True)
class Engine:
    """Built on the engine thread. base: the base draft, None without a draft model. context: maximum tokens of a prompt and its
    answer."""

    decoder: Decoder
    base: Draft | None
    eos: frozenset[int]
    context: int
    provenance: Provenance
    detokenizer: Callable[[], Detokenizer]
    weights: int = 0
    """Bytes of the models."""

    def memory(self) -> Memory:
        """What is allocated. May be called from any thread."""
        return replace(
            device.memory(), weights=self.weights, kv=self.decoder.memory.kv_bytes, prefix=self.decoder.prefixes.nbytes
        )

    def check(self, prompt: Prompt) -> None:
        """Raises BadRequest for an empty prompt, or if the prompt and its answer exceed the context. May be called from any
        thread."""
        check_length(prompt, self.context)

    def new_request(self, id: str, prompt: Prompt, arrived_at: float) -> Request:
        """A request for a checked prompt, with a new detokenizer and its stop strings. arrived_at: perf_counter."""
        text = TextStream(self.detokenizer(), prompt.sampling.stop, include_stop=prompt.sampling.include_stop)
        return Request(id, prompt, self.eos, text, arrived_at=arrived_at)


def check_length(prompt: Prompt, context: int) -> None:
    """Raises BadRequest for an empty prompt, or if the prompt and its answer exceed the context."""
    room = context - len(prompt.tokens)
    if not prompt.tokens:
        raise BadRequest("the prompt is empty", field="prompt")
    if room < prompt.sampling.max_tokens:
        raise BadRequest(
            f"prompt ({len(prompt.tokens)} tokens) and max_tokens ({prompt.sampling.max_tokens}) exceed the context "
            f"of {context} tokens",
            field="max_tokens" if room > 0 else "prompt",
        )
