"""`generate` and `chat`: the engine in this process, without a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, NamedTuple

import typer

from service.cli.console import err, out
from service.cli.models import model_folders
from service.cli.options import Config, Draft, Model, Target, one_target, settings_from
from service.core import Delta, Finished, Prompt, Sampling

Temperature = Annotated[float, typer.Option(min=0.0, max=10.0, help="Sampling temperature; below 1e-5 greedy.")]
MaxTokens = Annotated[int, typer.Option(min=1)]
Seed = Annotated[int | None, typer.Option(min=0, help="Makes sampling repeatable, with any draft.")]
K = Annotated[int | None, typer.Option("--num-draft-tokens", min=0, help="Draft length per round.")]


class Talker(NamedTuple):
    """A loaded pair: `say` decodes one conversation and hands over the text of every round."""

    say: Callable[[Sequence[dict[str, str]], Sampling, Callable[[Delta], None]], Finished]


def _load(config: Config, target: str | None, draft: str | None, k: int | None) -> Talker:
    from service.core import StoreError
    from service.engine.adapters import load, served
    from service.engine.decoder import Decoder
    from service.engine.kv.budget import prefix_bytes
    from service.engine.kv.prefix import PrefixCache
    from service.engine.request import Request, TextStream
    from service.models.memory import device_free_bytes
    from service.models.pair import load_pair
    from service.models.text import TextEncoder
    from service.models.tokens import streaming_detokenizer
    from service.store.stores import open_stores

    settings = settings_from(config, models__target=target, models__draft=draft, engine__num_draft_tokens=k)
    folders = model_folders(settings)
    pair = load_pair(folders.target, folders.draft)
    drafting = served(pair.draft) if pair.draft is not None else None
    if drafting is not None:
        try:
            stores = open_stores(settings)
        except StoreError:
            pass  # This home has never served: use the base draft.
        else:
            active = stores.adapters.active(pair.provenance.target, pair.provenance.draft)
            stores.close()
            if active is not None:
                drafting = load(drafting.model, active, pair.provenance.draft)
    encoder = TextEncoder(pair.target.tokenizer, pair.vocabulary, pair.eos)
    decoder = Decoder(
        pair.target.model,
        drafting,
        vocabulary=pair.vocabulary,
        k=settings.engine.num_draft_tokens,
        adaptive=settings.engine.adaptive,
        lookup=settings.engine.num_lookup_tokens,
        # Each turn reuses the prefix of the previous one.
        prefix=PrefixCache(prefix_bytes(settings.engine.prefix_cache_mb, device_free_bytes() // 8)),
    )
    decoder.profile(1)

    def say(messages: Sequence[dict[str, str]], sampling: Sampling, on_delta: Callable[[Delta], None]) -> Finished:
        text = TextStream(streaming_detokenizer(pair.target.tokenizer), sampling.stop)
        hidden = encoder.hidden_tokens(split=False, tools=False, stop=sampling.stop)
        row = Request("0", Prompt(encoder.encode_chat(messages).tokens, sampling, hidden=hidden), pair.eos, text)
        decoder.admit(row)
        while row.finish is None:
            for delta in decoder.round().deltas:
                on_delta(delta)
        if row.error is not None:
            raise row.error
        return row.finished()

    return Talker(say)


def _summary(done: Finished) -> str:
    t = done.timings
    rate = t.draft_n_accepted / t.draft_n if t.draft_n else 0.0
    return (
        f"{t.predicted_n} tokens, {t.predicted_per_second:.1f} tokens/s, {t.predicted_n / max(t.rounds, 1):.2f} tokens per "
        f"target call, acceptance {rate:.2f} ({t.draft_n_accepted} of {t.draft_n} drafted)"
    )


def generate(
    prompt: Annotated[str, typer.Argument(help="One user message.")],
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    max_tokens: MaxTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    num_draft_tokens: K = None,
) -> None:
    """Answer one prompt; the text goes to stdout, statistics to stderr."""
    talker = _load(config, target, draft, num_draft_tokens)
    sampling = Sampling(temperature=temperature, max_tokens=max_tokens, seed=seed)
    done = talker.say([{"role": "user", "content": prompt}], sampling, lambda delta: typer.echo(delta.text, nl=False))
    typer.echo()
    err.print(_summary(done), style="dim", highlight=False)


def chat(
    model: Model = None,
    config: Config = None,
    target: Target = None,
    draft: Draft = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    num_draft_tokens: K = None,
) -> None:
    """Chat with the model. Text proposed by the draft is green, the target's own is plain. An empty line ends the chat."""
    talker = _load(config, one_target(model, target), draft, num_draft_tokens)
    messages: list[dict[str, str]] = []
    drafted = accepted = 0
    while True:
        try:
            line = typer.prompt("you", default="", show_default=False)
        except (EOFError, typer.Abort):
            break
        if not line.strip():
            break
        messages.append({"role": "user", "content": line})
        pieces: list[str] = []

        def show(delta: Delta, pieces: list[str] = pieces) -> None:
            pieces.append(delta.text)
            accepted_here = sum(delta.drafted)
            # A round's text is split where the draft's part ends, in proportion to its tokens.
            cut = len(delta.text) * accepted_here // max(len(delta.tokens), 1)
            out.print(delta.text[:cut], style="green", end="", markup=False, highlight=False, soft_wrap=True)
            out.print(delta.text[cut:], end="", markup=False, highlight=False, soft_wrap=True)

        done = talker.say(messages, Sampling(temperature=temperature, max_tokens=max_tokens, seed=seed), show)
        out.print()
        messages.append({"role": "assistant", "content": "".join(pieces)})
        drafted, accepted = drafted + done.timings.draft_n, accepted + done.timings.draft_n_accepted
        running = f"acceptance so far {accepted / drafted:.2f}" if drafted else "no draft"
        err.print(f"{_summary(done)}; {running}", style="dim", highlight=False)
