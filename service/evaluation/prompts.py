"""Prompt files (JSON lines with `id`, `domain`, `prompt`), and prompts as token ids."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from service.core import BadRequest
from service.models.pair import Pair
from service.models.text import TextEncoder


@dataclass(frozen=True, slots=True)
class PromptLine:
    """One prompt of a file. id: by default its line number. domain: by default the file's name without suffix."""

    id: str
    domain: str
    prompt: str


def read_prompts(path: Path, *, domain: str | None = None, limit: int | None = None) -> list[PromptLine]:
    """The prompts of a file: of one domain where given, the first `limit` of those.

    Raises BadRequest, which names file and line, for what cannot be read, and when no prompt is left.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"cannot read the prompts in {path}: {error}", field="prompts") from error
    found: list[PromptLine] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
            prompt: object = item["prompt"]
            if not isinstance(prompt, str) or not prompt.strip():
                raise ValueError("the prompt is not a text")
            made = PromptLine(str(item.get("id", number)), str(item.get("domain", path.stem)), prompt)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadRequest(f'{path}, line {number}: expected {{"id", "domain", "prompt"}} ({error})') from error
        if domain is None or made.domain == domain:
            found.append(made)
    if not found:
        raise BadRequest(f"{path} holds no prompts" + (f" of the domain {domain}" if domain else ""), field="prompts")
    return found[:limit]


def encode_prompts(pair: Pair, lines: Sequence[PromptLine]) -> list[tuple[int, ...]]:
    """Token ids of each prompt as a chat of one user turn, in the target's template."""
    encoder = TextEncoder(pair.target.tokenizer)
    return [encoder.encode_chat([{"role": "user", "content": line.prompt}]).tokens for line in lines]
