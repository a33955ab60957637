"""What makes two logged texts one and the same, two prompts one template, and untagged prompts one kind. Pure functions.

A template is a first user message but for order, repetition and numbers. A kind is found by SimHash (Charikar, STOC 2002) over
the pairs of neighbouring tokens with which a prompt begins: prompts that begin by one instruction lie close together. It is
coarse: free questions on one topic share few pairs and come to lie in several kinds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BITS = 64
LEAD = 48
"""Tokens of a prompt that say its kind."""
RADIUS = 16
"""Bits by which prompts of one kind differ at most, as long as there may be more kinds."""
KINDS = 16
"""Kinds there may be; once there are so many, a prompt goes to the nearest."""
SHARE = 0.5
"""Of a reservoir, or of what a run learns from, that one client or one template may hold where there is anything else."""
_CLIENT = b"client:"
_KIND = re.compile(r"cluster:([0-9a-f]{16})")


def content_key(prompt: bytes, output: bytes) -> bytes:
    """Equal for the same prompt with the same output alone. Both are token ids as stored, little-endian uint32."""
    return hashlib.sha256(len(prompt).to_bytes(8, "little") + prompt + output).digest()


def template(first_user: str, prompt: Sequence[int]) -> bytes:
    """Equal for prompts that say the same words, whatever their order, how often, and with which numbers. Of a prompt
    without a message the tokens are its words."""
    words = {re.sub(r"\d+", "0", word) for word in re.findall(r"\w+", first_user.lower())}
    if not words:
        words = {first_user.strip()} if first_user.strip() else {str(token) for token in prompt}
    return hashlib.sha256("\n".join(sorted(words)).encode("utf-8", "surrogatepass")).digest()


def groups_of(client: str | None, template: bytes) -> frozenset[bytes]:
    """The groups of a text: its template, and its client where it has a client tag."""
    return frozenset(
        {b"template:" + template} | ({_CLIENT + client.encode("utf-8", "surrogatepass")} if client else set())
    )


def is_client(group: bytes) -> bool:
    """Whether a group is a client's, and no template's."""
    return group.startswith(_CLIENT)


def kind(prompt: Sequence[int], known: Sequence[str]) -> str:
    """The name of the kind a prompt belongs to: one of `known` that is near, or else a new one, named by the prompt's own hash.
    Names that are no kind's are passed over."""
    own = simhash(prompt[:LEAD])
    kinds = sorted({found[1] for name in known if (found := _KIND.fullmatch(name))})
    near = min(kinds, key=lambda name: ((int(name, 16) ^ own).bit_count(), name), default=None)
    if near is not None and (len(kinds) >= KINDS or (int(near, 16) ^ own).bit_count() <= RADIUS):
        return f"cluster:{near}"
    return f"cluster:{own:016x}"


def simhash(tokens: Sequence[int]) -> int:
    """Of the distinct pairs of neighbours: each bit is what most pairs' hashes have there."""
    ids = np.array(tokens, dtype=np.uint64)
    with np.errstate(over="ignore"):
        first = _mixed(ids * np.uint64(0x9E3779B97F4A7C15))
        pairs = np.unique(_mixed(first[:-1] + ids[1:]) if len(ids) > 1 else first)
    ones = ((pairs[:, None] >> np.arange(BITS, dtype=np.uint64)) & np.uint64(1)).sum(axis=0)
    return sum(1 << bit for bit in np.flatnonzero(2 * ones > len(pairs)).tolist())


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser."""
    for multiplier, shift in ((0xBF58476D1CE4E5B9, 30), (0x94D049BB133111EB, 27)):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(multiplier)
    return z ^ (z >> np.uint64(31))
