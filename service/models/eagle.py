"""A draft of one layer that reads the target's hidden states beside the tokens (EAGLE-3, arXiv 2503.01840).

Entry i of a text is its token i and what the target made of token i - 1: the outputs of some of its layers, each brought to
unit size, side by side through one linear layer. Further than the target has read, the draft's own last hidden state stands in
for that. It is laid out as mlx-lm's models are: a backbone with embeddings, layers and a norm, and a head, so that adapters,
cuts and folding find what they look for. Embeddings and head are the target's.
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

from service.models.taps import Taps

ARCHITECTURE = "LlamaForCausalLMEagle3"
"""What config.json says, beside `taps` and a Llama's fields."""
_HIDDEN = -1e9
"""A score that has no share in a softmax, finite in half precision's exponent range too."""


@dataclass
class ModelArgs(LlamaArgs):
    """A Llama block's, and `taps`: the target's layers whose outputs are read, by index."""

    taps: tuple[int, ...] = ()


class Block(nn.Module):
    """One Llama block over token and feature joined."""

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
        x = self.joined(embedded, features)
        return self.after(x, self.self_attn(self.input_layernorm(x), mask, cache))

    def joined(self, embedded: mx.array, features: mx.array) -> mx.array:
        """Embedding and feature (B, N, hidden) each, brought to unit size and projected to one (B, N, hidden)."""
        return self.fuse(mx.concatenate([unit(embedded, self.eps), unit(features, self.eps)], axis=-1))

    def after(self, x: mx.array, attended: mx.array) -> mx.array:
        """The block's output (B, N, hidden), from its input `x` and the attention's output: residuals and MLP."""
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Backbone(nn.Module):
    """Embeddings, the one block and the norm: tokens and features to hidden states."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = [Block(args)]
        self.norm = nn.RMSNorm(args.hidden_size, eps=args.rms_norm_eps)

    def __call__(self, tokens: mx.array, cache: Any = None, features: mx.array | None = None) -> mx.array:
        """Hidden states (B, N, hidden), which the head reads and the next step takes for features.

        features: (B, N, hidden) of each entry; None: nothing is known of any.
        """
        embedded = self.embed_tokens(tokens)
        features = mx.zeros_like(embedded) if features is None else features
        held = None if cache is None else cache[0]
        return self.norm(self.layers[0](embedded, features, create_attention_mask(embedded, held), held))

    def unrolled(self, tokens: mx.array, features: mx.array, depth: int) -> list[mx.array]:
        """Hidden states (B, N, hidden) at every entry as the first, second ... draft step of a round would have them.

        In step j an entry sees the target's features up to j - 1 entries before it, and behind those the draft's own outputs
        of the steps between (the paper's training-time test).
        """
        block, embedded = self.layers[0], self.embed_tokens(tokens)
        keys, values, found = list[mx.array](), list[mx.array](), list[mx.array]()
        for _ in range(depth):
            x = block.joined(embedded, features)
            queries, new_keys, new_values = _projected(block.self_attn, block.input_layernorm(x))
            keys.append(new_keys)
            values.append(new_values)
            attended = _unrolled_attention(queries, keys, values, block.self_attn.scale)
            flat = attended.transpose(0, 2, 1, 3).reshape(*x.shape[:2], -1)
            found.append(self.norm(block.after(x, block.self_attn.o_proj(flat))))
            features = behind(found[-1])
        return found


class Model(nn.Module):
    """See the module. A model that is to read what its target makes of texts is bound to it first."""

    def __init__(self, args: ModelArgs) -> None:
        super().__init__()
        self.args = args
        self.model_type = args.model_type
        self.project = nn.Linear(len(args.taps) * args.hidden_size, args.hidden_size, bias=False)
        self.model = Backbone(args)
        if not args.tie_word_embeddings:
            self.lm_head = nn.Linear(args.hidden_size, args.vocab_size, bias=False)
        self._taps: Taps | None = None

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
        """The backbone's blocks, where mlx-lm looks for them."""
        return self.model.layers

    def bind(self, target: nn.Module) -> None:
        """Read this target's layers from now on. Raises PairError where they cannot be read."""
        self._taps = Taps(target, self.args.taps, self.args.hidden_size)

    def noted(self) -> mx.array:
        """What the target's last call over (B, N) tokens shows to the entries after them, (B, N, hidden)."""
        assert self._taps is not None
        states = [unit(state, self.args.rms_norm_eps) for state in self._taps.take()]
        return self.project(mx.concatenate(states, axis=-1).astype(self.project_dtype))

    @property
    def project_dtype(self) -> mx.Dtype:
        """Precision of what is read."""
        return cast("mx.array", cast("Any", self.model.norm).weight).dtype

    def features(self, tokens: mx.array) -> mx.array:
        """The features (B, N, hidden) of each entry of whole texts (B, N), by a call of the target."""
        assert self._taps is not None
        self._taps.model(tokens)
        return behind(self.noted())


def unit(x: mx.array, eps: float) -> mx.array:
    """x over its root mean square."""
    return mx.fast.rms_norm(x, None, eps)


def behind(x: mx.array, by: int = 1, axis: int = 1) -> mx.array:
    """x moved on by some places along an axis: zeros come in, the last fall out."""
    if by == 0:
        return x
    pads = [(by, 0) if at == axis % x.ndim else (0, 0) for at in range(x.ndim)]
    return mx.pad(mx.split(x, [x.shape[axis] - by], axis=axis)[0], pads)


def _projected(attention: Any, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Queries, keys and values (B, heads, N, dims) of whole texts, as the attention itself has them."""

    def heads(y: mx.array, count: int) -> mx.array:
        return y.reshape(*y.shape[:2], count, -1).transpose(0, 2, 1, 3)

    queries = attention.rope(heads(attention.q_proj(x), attention.n_heads))
    keys = attention.rope(heads(attention.k_proj(x), attention.n_kv_heads))
    return queries, keys, heads(attention.v_proj(x), attention.n_kv_heads)


def _unrolled_attention(
    queries: mx.array, keys: Sequence[mx.array], values: Sequence[mx.array], scale: float
) -> mx.array:
    """(B, heads, N, dims): every entry of the last of len(keys) steps over the first step's keys and values up to as many
    entries before it, and those that the later steps of its own round have written since."""
    steps = len(keys)
    if steps == 1:
        return mx.fast.scaled_dot_product_attention(queries, keys[0], values[0], scale=scale, mask="causal")
    rows, heads, length, dims = queries.shape
    groups = keys[0].shape[1]
    q = (queries * scale).reshape(rows, groups, heads // groups, length, dims)
    at = mx.arange(length)
    never = mx.array(_HIDDEN, dtype=q.dtype)
    seen = at[None, :] <= at[:, None] - (steps - 1)
    scores = [mx.where(seen, q @ keys[0][:, :, None].swapaxes(-1, -2), never)]
    for step in range(1, steps):
        back = steps - 1 - step
        own = (q * behind(keys[step], back, axis=2)[:, :, None]).sum(axis=-1, keepdims=True)
        scores.append(mx.where((at >= back)[:, None], own, never))
    weights = mx.softmax(mx.concatenate(scores, axis=-1), axis=-1, precise=True)
    out = weights[..., :length] @ values[0][:, :, None]
    for step in range(1, steps):
        share = weights[..., length + step - 1, None]
        out = out + share * behind(values[step], steps - 1 - step, axis=2)[:, :, None]
    return out.reshape(rows, heads, length, dims)


def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
    """What mlx-lm makes such a folder into."""
    return Model, ModelArgs


def described(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of this kind."""
    return ARCHITECTURE in (config.get("architectures") or ())


def bind(draft: nn.Module, target: nn.Module) -> None:
    """Let a draft that reads its target's hidden states read this one's; nothing for one that does not."""
    if isinstance(draft, Model):
        draft.bind(target)
