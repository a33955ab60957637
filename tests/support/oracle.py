"""The naive decoder: the target alone, one token at a time, on mlx-lm's stock cache. What every engine change is held to."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from service.core import Sampling
from service.engine.sampling import gumbel, noise_key


def naive(target: nn.Module, prompt: Sequence[int], sampling: Sampling, eos: frozenset[int] = frozenset()) -> list[int]:
    """Greedy or seeded output, up to and including an end token."""
    cache = make_prompt_cache(target)
    feed, out = mx.array([list(prompt)]), []
    for position in range(sampling.max_tokens):
        logits = target(feed, cache=cache)[0, -1].astype(mx.float32)
        if not sampling.greedy:
            assert sampling.seed is not None
            logits = tempered(logits[None], sampling)[0]
            logits = logits + gumbel([noise_key(sampling.seed, position)], logits.shape[-1])[0]
        token = int(mx.argmax(logits).item())
        out.append(token)
        if token in eos:
            break
        feed = mx.array([[token]])
    return out


def forced(
    target: nn.Module,
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: Sampling,
    eos: frozenset[int] = frozenset(),
) -> list[int]:
    """What `naive` would say at each position of `output`, from one pass over prompt and output.

    `output == forced(...)` holds exactly where `output == naive(...)` does: the first position at which they part is the
    same, and an answer that ends too soon or too late gets a token more or fewer. Not for recurrent models, whose one pass
    over a text is other arithmetic than their steps.
    """
    text = [*prompt, *output]
    logits = target(mx.array([text]), cache=make_prompt_cache(target))[0, len(prompt) - 1 :].astype(mx.float32)
    if not sampling.greedy:
        assert sampling.seed is not None
        keys = [noise_key(sampling.seed, position) for position in range(len(output) + 1)]
        logits = tempered(logits, sampling) + gumbel(keys, logits.shape[-1])
    said: list[int] = mx.argmax(logits, axis=-1).tolist()  # pyright: ignore[reportAssignmentType]
    for i, token in enumerate(said[: sampling.max_tokens]):
        if token in eos:
            return said[: i + 1]
    return said[: sampling.max_tokens]


def tempered(logits: mx.array, sampling: Sampling) -> mx.array:
    """mlx-lm's own filters in its own order, then the temperature: log-probabilities (N, V)."""
    logp = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    if sampling.top_p < 1.0:
        logp = apply_top_p(logp, sampling.top_p)
    if sampling.min_p > 0.0:
        logp = apply_min_p(logp, sampling.min_p)
    if sampling.top_k > 0:
        logp = apply_top_k(logp, sampling.top_k)
    logp = logp / sampling.temperature
    return logp - mx.logsumexp(logp, axis=-1, keepdims=True)


def tiny_llama(seed: int, *, layers: int = 2, vocabulary: int = 97, hidden: int = 32, sharpness: float = 4.0) -> Model:
    """A random Llama whose next-token law is peaked enough to have clear argmaxes and soft enough to sample from."""
    mx.random.seed(seed)
    model = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=hidden,
            num_hidden_layers=layers,
            intermediate_size=2 * hidden,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=vocabulary,
            tie_word_embeddings=False,
        )
    )
    model.lm_head.weight = model.lm_head.weight * sharpness
    mx.eval(model.parameters())
    return model


def relative(model: Model, seed: int, noise: float) -> Model:
    """A draft for `model`: the same weights with noise added, so that it is right some of the time."""
    mx.random.seed(seed)
    from mlx.utils import tree_flatten, tree_unflatten

    other = tiny_llama(seed, layers=len(model.layers), vocabulary=model.args.vocab_size, hidden=model.args.hidden_size)
    weights = [(n, a + noise * a.std() * mx.random.normal(a.shape)) for n, a in tree_flatten(model.parameters())]
    other.update(tree_unflatten(weights))
    mx.eval(other.parameters())
    return other
