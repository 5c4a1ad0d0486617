"""Prompt prefixes that many requests share, to be run through a policy before it serves everyone.

A policy's prefix cache is its own, so the first requests after a flip would all pay for the tools and the
system message again. Counted over recent requests that an engine answered; bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from server.engine.launch import BATCH_PRIORITY

REMEMBERED = 256
LARGEST = 64 * 1024
"""Bytes of a prefix; a longer one is one caller's document."""
PRIORITY = BATCH_PRIORITY - 1
"""Later than anybody who waits; but a flip waits for it, so it is not put aside as batch work is."""


@dataclass(slots=True)
class _Prefix:
    body: dict[str, Any]
    uses: int = 0


class Prefixes:
    def __init__(self) -> None:
        self._known: OrderedDict[bytes, _Prefix] = OrderedDict()

    def observe(
        self, cache_salt: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
    ) -> None:
        """Count the part of this prompt that others are likely to begin with too."""
        body = shared(cache_salt, messages, tools)
        if body is None:
            return
        key = msgspec.json.encode(body)
        if len(key) > LARGEST:
            return
        prefix = self._known.setdefault(key, _Prefix(body))
        prefix.uses += 1
        self._known.move_to_end(key)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    def hottest(self, n: int) -> list[dict[str, Any]]:
        """Chat bodies without a model, most used first; counts are halved so that old heat fades."""
        hot = sorted(self._known.values(), key=lambda prefix: -prefix.uses)[:n]
        for prefix in self._known.values():
            prefix.uses //= 2
        return [prefix.body for prefix in hot]


def shared(
    cache_salt: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None
) -> dict[str, Any] | None:
    """The part of a prompt that others are likely to begin with too, as a chat body; None without one."""
    leading = messages[:1] if messages[0]["role"] == "system" else []
    if not leading and not tools:
        return None
    body: dict[str, Any] = {
        "messages": [*leading, {"role": "user", "content": "."}],
        "cache_salt": cache_salt,
        "max_completion_tokens": 1,
    }
    return body | ({"tools": tools} if tools else {})
