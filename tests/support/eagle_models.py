"""Tiny EAGLE heads, and a reference for their proposals: one draft step at a time."""

from collections.abc import Callable, Sequence

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import KVCache
from mlx_lm.models.llama import Model

from service.models.eagle import Model as Head
from service.models.eagle import ModelArgs
from tests.support.oracle import noisy_copy, tiny_llama

TAPS = (0, 1)
Choose = Callable[[int, mx.array], int]
"""A token from its place in a proposal and the logits (V,) there."""


def plain_llama(seed: int, *, vocabulary: int = 97, sharpness: float = 4.0) -> Model:
    """A tiny target whose next token depends mostly on its last one, so that a head of one block can predict it."""
    model = tiny_llama(seed, vocabulary=vocabulary, sharpness=sharpness)
    for block in model.layers:
        block.self_attn.o_proj.weight = 0.5 * block.self_attn.o_proj.weight
        block.mlp.down_proj.weight = 0.5 * block.mlp.down_proj.weight
    mx.eval(model.parameters())
    return model


def tiny_head(target: Model, seed: int, *, noise: float = 0.1, reads: float = 0.3) -> Head:
    """A draft for `target`, bound to it: its first block over the token's embedding plus `reads` of the hidden states."""
    size = target.args.hidden_size
    head = Head(
        ModelArgs(
            model_type="llama",
            hidden_size=size,
            num_hidden_layers=1,
            intermediate_size=target.args.intermediate_size,
            num_attention_heads=target.args.num_attention_heads,
            num_key_value_heads=target.args.num_key_value_heads,
            rms_norm_eps=target.args.rms_norm_eps,
            vocab_size=target.args.vocab_size,
            tie_word_embeddings=False,
            taps=TAPS,
        )
    )
    own = dict(tree_flatten(noisy_copy(target, seed, noise).parameters()))
    weights = {name: array for name, array in own.items() if not name.startswith("model.layers.1.")}
    mx.random.seed(seed)
    usual = mx.sqrt(mx.square(own["model.embed_tokens.weight"]).mean())
    weights["model.layers.0.fuse.weight"] = usual * mx.concatenate(
        [mx.eye(size), reads * mx.random.normal((size, size)) / size**0.5], axis=1
    )
    weights["project.weight"] = mx.random.normal((size, 2 * size)) / size**0.5
    head.update(tree_unflatten(list(weights.items())))
    head.eval()
    mx.eval(head.parameters())
    head.bind(target)
    return head


def proposal(head: Head, read: Sequence[int], k: int, choose: Choose) -> tuple[list[int], list[mx.array]]:
    """The head's proposal after `read`, whose last token the target has not read, and the logits (V,) of each choice: step by
    step on mlx-lm's own cache, from the second step on over the head's own hidden states."""
    tokens, cache = mx.array([list(read)]), [KVCache()]
    hidden = head.model(tokens, cache, head.features(tokens))[:, -1:]
    chosen, logits = list[int](), list[mx.array]()
    while len(chosen) < k:
        logits.append(head.logits(hidden)[0, 0])
        chosen.append(choose(len(chosen), logits[-1]))
        hidden = head.model(mx.array([[chosen[-1]]]), cache, hidden)
    return chosen, logits
