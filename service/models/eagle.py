"""EAGLE-3 head: a draft model of one layer that reads the target's hidden states and the tokens (arXiv 2503.01840).

Its input at position i is token i and a feature vector of position i - 1: the target's hidden states of the feature layers,
each divided by its root mean square, concatenated and projected by one linear layer. Past the target's last position, the
feature is the draft's hidden state of the previous step. The model has the layout of mlx-lm's models (`model.embed_tokens`,
`model.layers`, `model.norm`, `lm_head`), so adapters, reduced vocabularies and folding apply to it as to any other. Embeddings
and output head are the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.llama import MLP, Attention
from mlx_lm.models.llama import ModelArgs as LlamaArgs

from service.models.feature_cache import FeatureCache
from service.models.hidden_states import HiddenStateCapture
from service.models.padding import Tokens

ARCHITECTURE = "LlamaForCausalLMEagle3"
"""`architectures` in config.json, which also has `taps` and the fields of a Llama."""
_MASKED = -1e9
"""Attention score of a masked position: its softmax weight is 0."""


@dataclass
class ModelArgs(LlamaArgs):
    """The arguments of a Llama block. taps: indices of the target's feature layers (the name in config.json)."""

    taps: tuple[int, ...] = ()


class Block(nn.Module):
    """A Llama block whose input is a token embedding and a feature vector, fused by a linear layer."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.fuse = nn.Linear(2 * args.hidden_size, args.hidden_size, bias=False)
        self.self_attn = Attention(args)
        self.mlp = MLP(args)
        self.input_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)
        self.eps = args.rms_norm_eps

    def __call__(self, embedded: mx.array, features: mx.array, mask: Any, cache: Any) -> mx.array:
        """embedded, features: (B, N, hidden) each."""
        x = self.fused(embedded, features)
        return self.residual(x, self.self_attn(self.input_layernorm(x), mask, cache))

    def fused(self, embedded: mx.array, features: mx.array) -> mx.array:
        """The block's input (B, N, hidden): embeddings and features (B, N, hidden each), RMS-normalised and projected."""
        return self.fuse(
            mx.concatenate([rms_normalise(embedded, self.eps), rms_normalise(features, self.eps)], axis=-1)
        )

    def residual(self, x: mx.array, attended: mx.array) -> mx.array:
        """The block's output (B, N, hidden), from its input `x` and the attention's output: residual connections and MLP."""
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Token ids and features to hidden states: embeddings, one block, final norm."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [Block(args)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, tokens: mx.array, cache: Any = None, features: mx.array | None = None) -> mx.array:
        """Hidden states (B, N, hidden): the output head's input, and the features of the next draft step.

        features: (B, N, hidden), those of the position before each token; None: zeros.
        """
        embedded = self.embed_tokens(tokens)
        features = mx.zeros_like(embedded) if features is None else features
        layer_cache = None if cache is None else cache[0]
        mask = create_attention_mask(embedded, layer_cache)
        return self.norm(self.layers[0](embedded, features, mask, layer_cache))

    def unrolled(self, tokens: mx.array, features: mx.array, depth: int) -> list[mx.array]:
        """Hidden states (B, N, hidden) at every position for each of `depth` draft steps: EAGLE-3's training-time test.

        In step j (from 1) a position sees the target's features up to j - 1 positions before it, and after those the draft's
        hidden states of the steps in between.
        """
        block, embedded = self.layers[0], self.embed_tokens(tokens)
        keys, values, states = list[mx.array](), list[mx.array](), list[mx.array]()
        for _ in range(depth):
            x = block.fused(embedded, features)
            queries, new_keys, new_values = _attention_inputs(block.self_attn, block.input_layernorm(x))
            keys.append(new_keys)
            values.append(new_values)
            attended = _unrolled_attention(queries, keys, values, block.self_attn.scale)
            flat = attended.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
            states.append(self.norm(block.residual(x, block.self_attn.o_proj(flat))))
            features = shift_right(states[-1])
        return states


class Model(nn.Module):
    """The EAGLE-3 head (see the module). `bind` it to its target before it is used for drafting or training."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.project = nn.Linear(len(args.taps) * args.hidden_size, args.hidden_size, bias=False)
        self.model = Backbone(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)
        self._capture: HiddenStateCapture | None = None
        self._cache = FeatureCache(0)

    def __call__(self, tokens: mx.array, cache: Any = None, features: mx.array | None = None) -> mx.array:
        """Logits (B, N, V) after each of tokens (B, N). features: see Backbone."""
        return self.logits(self.model(tokens, cache, features))

    def logits(self, hidden: mx.array) -> mx.array:
        """Logits (..., V) from hidden states (..., hidden)."""
        if self.args.tie_word_embeddings:
            return self.model.embed_tokens.as_linear(hidden)
        return self.lm_head(hidden)

    @property
    def layers(self) -> list[Block]:
        """The backbone's blocks, under the name that mlx-lm expects."""
        return self.model.layers

    def bind(self, target: nn.Module, cache: FeatureCache | None = None) -> None:
        """Capture this target's feature layers from now on. cache: for features of texts. Raises PairError if the target lacks
        these layers or their width differs."""
        self._capture = HiddenStateCapture(target, self.args.taps, self.args.hidden_size)
        self._cache = cache or FeatureCache(0)

    def target_features(self) -> mx.array:
        """Features (B, N, hidden) of the tokens (B, N) of the target's last call, from its captured hidden states."""
        assert self._capture is not None
        states = [rms_normalise(state, self.args.rms_norm_eps) for state in self._capture.take()]
        return self.project(mx.concatenate(states, axis=-1).astype(self.feature_dtype))

    @property
    def feature_dtype(self) -> mx.Dtype:
        """The dtype of features: that of the model's weights."""
        return cast("mx.array", cast("Any", self.model.norm).weight).dtype

    def features(self, tokens: mx.array) -> mx.array:
        """The features (B, N, hidden) that the head reads at each position of whole texts (B, N). Calls the target."""
        assert self._capture is not None
        self._capture.model(tokens)
        return shift_right(self.target_features())

    def features_of(self, texts: Sequence[Tokens], starts: Sequence[int], length: int) -> mx.array:
        """`features` of B texts at `length` positions from `starts` on, (B, length, hidden), zeros past a text's end. Uses the
        cache where possible."""
        return self._cache.of(texts, starts, length, self.features)

    def clear_features(self) -> None:
        """Drop the cached features of texts."""
        self._cache.clear()


def rms_normalise(x: mx.array, eps: float) -> mx.array:
    """x divided by its root mean square along the last axis."""
    return mx.fast.rms_norm(x, None, eps)


def shift_right(x: mx.array, by: int = 1, axis: int = 1) -> mx.array:
    """x shifted by some positions along an axis: the first ones become zero, the last ones are dropped."""
    if by == 0:
        return x
    pads = [(by, 0) if at == axis % x.ndim else (0, 0) for at in range(x.ndim)]
    return mx.pad(mx.split(x, [x.shape[axis] - by], axis=axis)[0], pads)


def _attention_inputs(attention: Any, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values (B, heads, N, dims) of whole texts, with RoPE applied."""

    def heads(y: mx.array, count: int) -> mx.array:
        return y.reshape(*y.shape[:2], count, -1).transpose(0, 2, 1, 3)

    queries = attention.rope(heads(attention.q_proj(x), attention.n_heads))
    keys = attention.rope(heads(attention.k_proj(x), attention.n_kv_heads))
    return queries, keys, heads(attention.v_proj(x), attention.n_kv_heads)


def _unrolled_attention(
    queries: mx.array, keys: Sequence[mx.array], values: Sequence[mx.array], scale: float
) -> mx.array:
    """Attention output (B, heads, N, dims) of draft step len(keys).

    keys, values: (B, KV heads, N, dims) of each step so far. A position attends to the first step's keys up to len(keys) - 1
    positions before it, and to one key of each later step of the same round.
    """
    steps = len(keys)
    if steps == 1:
        return mx.fast.scaled_dot_product_attention(queries, keys[0], values[0], scale=scale, mask="causal")
    rows, heads, length, dims = queries.shape
    groups = keys[0].shape[1]
    q = (queries * scale).reshape(rows, groups, heads // groups, length, dims)
    at = mx.arange(length)
    masked = mx.array(_MASKED, dtype=q.dtype)
    visible = at[None, :] <= at[:, None] - (steps - 1)
    scores = [mx.where(visible, q @ keys[0][:, :, None].swapaxes(-1, -2), masked)]
    for step in range(1, steps):
        back = steps - 1 - step
        score = (q * shift_right(keys[step], back, axis=2)[:, :, None]).sum(axis=-1, keepdims=True)
        scores.append(mx.where((at >= back)[:, None], score, masked))
    weights = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1, precise=True)
    out = weights[..., :length] @ values[0][:, :, None]
    for step in range(1, steps):
        weight = weights[..., length + step - 1, None]
        out = out + weight * shift_right(values[step], steps - 1 - step, axis=2)[:, :, None]
    return out.reshape(rows, heads, length, dims)


def model_classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """The model and argument classes, for mlx-lm's `load_model(get_model_classes=...)`."""
    return Model, ModelArgs


def is_eagle_config(config: Mapping[str, Any]) -> bool:
    """Whether a config.json describes an EAGLE-3 head."""
    return ARCHITECTURE in (config.get("architectures") or ())


def bind(draft: nn.Module, target: nn.Module, cache: FeatureCache | None = None) -> None:
    """Bind an EAGLE-3 head to its target; does nothing for other draft models. Raises PairError as `Model.bind`."""
    if isinstance(draft, Model):
        draft.bind(target, cache)
