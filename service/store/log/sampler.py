"""Which logged texts count as evidence: one sampler for the gate, the watch and what a run learns from. Pure functions.

Equal texts count once, no client and no template has more than its share, and turns of one conversation are known as such, so
that whoever estimates from them can resample conversations instead of texts.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.core import Prompt
from service.store.log.likeness import SHARE, content_key, groups_of, is_client, template
from service.store.log.rows import id_bytes

FEW_OTHERS = 0.02
"""No group is cut while all others together hold less than this share of the conversations: a service's only client and a
health check."""
MIN_TEXTS = 8
"""Texts of one client or template that are never cut."""
MAX_TURNS = 8
"""Texts of one conversation at most: turns of one are alike, and a conversation that outweighs all others leaves a bootstrap
over conversations nothing to resample."""


@dataclass(frozen=True, slots=True)
class Text:
    """What the sampler needs to know of a logged generation. key: equal for the same prompt with the same output. conversation:
    equal for prompts with the same first user message. groups: its client and its template."""

    id: str
    key: bytes
    conversation: str
    groups: frozenset[bytes]


def text(name: str, *, prompt: bytes, output: bytes, client: str | None, first_user: str) -> Text:
    """From the columns of a row: prompt and output are token ids, little-endian uint32. client: the API key's name, where there
    was one; the tags that its holder gives are below it."""
    tokens = () if first_user.strip() else np.frombuffer(prompt, dtype="<u4").tolist()
    groups = groups_of(client, template(first_user, tokens))
    return Text(name, content_key(prompt, output), _conversation(first_user, prompt), groups)


def conversation(prompt: Prompt) -> str:
    """Name of the conversation a prompt belongs to: its first user message, or all of its tokens where there is none."""
    return _conversation(prompt.first_user, id_bytes(prompt.tokens))


def _conversation(first_user: str, prompt: bytes) -> str:
    beginning = first_user.encode("utf-8", "surrogatepass") if first_user else prompt
    return hashlib.sha256(beginning).hexdigest()[:16]


def capped(texts: Sequence[Text], *, client_share: float = SHARE) -> list[Text]:
    """Each text once, and of one client or one template no more than their share of what stays, in the order given: the first
    of each stay. Texts without a client tag belong to no client. Where there is hardly anything else, a group may have it all.

    The group that exceeds its share most is cut to it, and so on, until none does. MIN_TEXTS of a group always stay, so that a
    single text of somebody else cannot cut a whole service to nothing. client_share: of one client; its equal part where there
    are too few clients for that.
    """
    distinct: dict[bytes, Text] = {}
    for one in texts:
        distinct.setdefault(one.key, one)
    left = list(distinct.values())
    clients = {group for one in left for group in one.groups if is_client(group)}
    client_share = max(client_share, 1.0 / max(len(clients), 2))

    def share(group: bytes) -> float:
        return client_share if group in clients else SHARE

    while left:
        counts = Counter(group for one in left for group in one.groups)
        largest, held = max(counts.items(), key=lambda item: (item[1] / share(item[0]), item[0]))
        most = max(int((len(left) - held) * share(largest) / (1.0 - share(largest))), MIN_TEXTS)
        others = {one.conversation for one in left if largest not in one.groups}
        if held <= most or len(others) < FEW_OTHERS * len({one.conversation for one in left}):
            break
        cut = {one.key for one in [one for one in left if largest in one.groups][most:]}
        left = [one for one in left if one.key not in cut]
    return left


def sample(texts: Sequence[Text], limit: int, seed: int) -> list[Text]:
    """At most `limit` of them, `capped`, and at most MAX_TURNS of one conversation. The draw is a function of the texts and the
    seed alone: another seed draws others where there are more than `limit`."""
    drawn = sorted(texts, key=lambda one: hashlib.sha256(seed.to_bytes(8, "little") + one.key).digest())
    turns: Counter[str] = Counter()
    few: list[Text] = []
    for one in {one.key: one for one in drawn}.values():
        turns[one.conversation] += 1
        if turns[one.conversation] <= MAX_TURNS:
            few.append(one)
    return capped(few)[:limit]
