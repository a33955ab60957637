"""The naive decoder: the target alone, one token at a time, on mlx-lm's stock cache. The reference for every engine test."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from service.core import Sampling
from tests.support.typed import as_float, as_int, as_ints, leaves

READ = 64
"""Tokens per call: on a CPU calls over some hundreds of tokens cost several times as much per token."""
_WORD = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def splitmix64(state: int) -> int:
    """The output function of SplitMix64 (Steele, Lea & Flood 2014), of 64-bit words."""
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def seeded_key(seed: int, position: int) -> tuple[int, int]:
    """The noise key of an output position, by its definition and not by the engine's code."""
    mixed = splitmix64(seed ^ (position * 0x9E3779B97F4A7C15 % 2**64))
    return mixed >> 32, mixed & _WORD


def threefry(key: tuple[int, int], first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011) of counters given as two arrays of 32-bit words."""
    keys = [np.uint32(word) for word in (key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA)]
    a, b = first.astype(np.uint32) + keys[0], second.astype(np.uint32) + keys[1]
    for block in range(5):
        for turn in _ROTATIONS[block % 2]:
            a = a + b
            b = (b << np.uint32(turn) | b >> np.uint32(32 - turn)) ^ a
        a, b = a + keys[(block + 1) % 3], b + keys[(block + 2) % 3] + np.uint32(block + 1)
    return a, b


def seeded_noise(seed: int, position: int, vocabulary: int) -> np.ndarray:
    """(V,) standard Gumbel noise: MLX's uniform draws from Threefry's words, whose counters depend on the width."""
    key, half, odd = seeded_key(seed, position), vocabulary // 2, vocabulary % 2
    # The counter in the middle of an odd width comes alone.
    first = np.arange(half + odd)
    second = np.concatenate([np.arange(half) + half + odd, np.zeros(odd, dtype=np.int64)])
    left, right = threefry(key, first, second)
    uniform = np.concatenate([left, right[:half]]).astype(np.float32) / np.float32(_WORD)
    uniform = np.minimum(uniform, np.nextafter(np.float32(1), np.float32(0)))
    with np.errstate(divide="ignore"):
        return -np.log(-np.log(uniform))


def naive(target: nn.Module, prompt: Sequence[int], sampling: Sampling, eos: frozenset[int] = frozenset()) -> list[int]:
    """Greedy or seeded output, up to and including an end token."""
    cache = make_prompt_cache(target)
    feed, out, ends = list(prompt), [], ends_of(sampling, eos)
    for position in range(sampling.max_tokens):
        logits = read(target, feed, cache)[-1].astype(mx.float32)
        for biased, added in sampling.logit_bias:
            logits[biased] += added
        logits = bent(logits, prompt, out, sampling, eos)
        if not sampling.greedy:
            assert sampling.seed is not None
            logits = filtered_logprobs(logits[None], sampling)[0]
            logits = logits + mx.array(seeded_noise(sampling.seed, position, logits.shape[-1]))
        token = as_int(mx.argmax(logits))
        out.append(token)
        if token in ends:
            break
        feed = [token]
    return out


def ends_of(sampling: Sampling, eos: frozenset[int]) -> frozenset[int]:
    """The tokens that end an answer without a grammar."""
    return frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos)


def bent(
    logits: mx.array,
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: Sampling,
    eos: frozenset[int] = frozenset(),
) -> mx.array:
    """Logits (V,) under penalties, bad words and the least length, by vLLM's definitions, over the whole vocabulary."""
    scores = np.array(logits, dtype=np.float32)
    said, heard = Counter(output), {*prompt, *output}
    for token in heard if sampling.repetition_penalty != 1.0 else ():
        by = np.float32(sampling.repetition_penalty)
        scores[token] = scores[token] / by if scores[token] > 0 else scores[token] * by
    for token, count in said.items():
        scores[token] -= np.float32(sampling.frequency_penalty) * np.float32(count)
        scores[token] -= np.float32(sampling.presence_penalty)
    free = scores.copy()
    if len(output) < sampling.min_tokens:
        scores[[*eos, *sampling.stop_token_ids]] = -np.inf
    for word in sampling.bad_words:
        behind = list(word[:-1])
        if list(output[len(output) - len(behind) :]) == behind and len(output) >= len(behind):
            scores[word[-1]] = -np.inf
    # A grammar that leaves only what is banned has its way.
    return mx.array(scores if np.isfinite(scores).any() else free)


def read(target: nn.Module, tokens: Sequence[int], cache: list[Any]) -> mx.array:
    """Logits (n, V) after each of n tokens."""
    calls = (tokens[start : start + READ] for start in range(0, len(tokens), READ))
    return mx.concatenate([target(mx.array([list(call)]), cache=cache)[0] for call in calls])


def forced(
    target: nn.Module,
    prompt: Sequence[int],
    output: Sequence[int],
    sampling: Sampling,
    eos: frozenset[int] = frozenset(),
) -> list[int]:
    """The token `naive` would choose at each position of `output`, from one pass over prompt and output.

    `output == forced(...)` holds exactly if `output == naive(...)` does: the first difference is at the same position, and an
    answer that ends too soon or too late gets a token more or fewer. Not for recurrent models, whose pass over a text
    rounds differently from their steps.
    """
    text = [*prompt, *output]
    logits = read(target, text, make_prompt_cache(target))[len(prompt) - 1 :].astype(mx.float32)
    if sampling.penalised or sampling.bad_words or sampling.min_tokens:
        logits = mx.stack([bent(each, prompt, output[:i], sampling, eos) for i, each in enumerate(logits)])
    if not sampling.greedy:
        assert sampling.seed is not None
        width = logits.shape[-1]
        noise = [seeded_noise(sampling.seed, position, width) for position in range(len(output) + 1)]
        logits = filtered_logprobs(logits, sampling) + mx.array(np.stack(noise))
    tokens = as_ints(mx.argmax(logits, axis=-1))
    for i, token in enumerate(tokens[: sampling.max_tokens]):
        if token in ends_of(sampling, eos):
            return tokens[: i + 1]
    return tokens[: sampling.max_tokens]


TIE = 4e-6
"""Scores that differ by less are a tie in float32: the same logits from calls of other shapes differ by so much."""


def tied(target: nn.Module, text: Sequence[int], position: int, sampling: Sampling, tokens: Sequence[int]) -> bool:
    """Whether the target's scores of these tokens behind a text, at a position of the output, are a tie."""
    logits = read(target, text, make_prompt_cache(target))[-1:].astype(mx.float32)
    if not sampling.greedy:
        assert sampling.seed is not None
        noise = seeded_noise(sampling.seed, position, logits.shape[-1])
        logits = filtered_logprobs(logits, sampling) + mx.array(noise)
    scores = [as_float(logits[0, token]) for token in tokens]
    return max(scores) - min(scores) < TIE


def filtered_logprobs(logits: mx.array, sampling: Sampling) -> mx.array:
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
    """A random Llama whose next-token distribution is peaked enough for clear argmaxes and soft enough to sample from."""
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


def noisy_copy(model: Model, seed: int, noise: float) -> Model:
    """A draft for `model`: the same weights with noise added, so that it is right some of the time."""
    mx.random.seed(seed)
    from mlx.utils import tree_unflatten

    other = tiny_llama(seed, layers=len(model.layers), vocabulary=model.args.vocab_size, hidden=model.args.hidden_size)
    weights = [(n, a + noise * a.std() * mx.random.normal(a.shape)) for n, a in leaves(model.parameters())]
    other.update(tree_unflatten(weights))
    mx.eval(other.parameters())
    return other
