"""The heavy part of a completion as bytes: msgpack with ids packed as int32 and log-probs as float32.

Invariant: ``unpack(pack(completion))`` gives back every id, and every log-prob exactly when it is a float32
(as all log-probs of an engine are).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from rollout.records import Choice, Completion


class PackedChoice(msgspec.Struct, frozen=True, array_like=True):
    index: int
    message: dict[str, Any]
    finish_reason: str | None
    token_ids: bytes
    logprobs: bytes


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """`version` first, so that a later layout can be told apart."""

    version: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    params: dict[str, Any]
    prompt_token_ids: bytes
    choices: list[PackedChoice]


def pack(completion: Completion) -> bytes:
    """Raises OverflowError for an id outside int32, ValueError for ids and log-probs of different counts."""
    return msgspec.msgpack.encode(
        Payload(
            version=1,
            messages=completion.messages,
            tools=completion.tools,
            params=completion.params,
            prompt_token_ids=_to_bytes("i", completion.prompt_token_ids),
            choices=[_pack_choice(choice) for choice in completion.choices],
        )
    )


def unpack(data: bytes) -> Payload:
    payload = msgspec.msgpack.decode(data, type=Payload)
    if payload.version != 1:
        raise ValueError(f"completion payload has version {payload.version}; this code reads version 1")
    return payload


def prompt_token_ids(payload: Payload) -> list[int]:
    return [int(i) for i in _from_bytes("i", payload.prompt_token_ids)]


def choices(payload: Payload) -> list[Choice]:
    return [
        Choice(
            index=choice.index,
            message=choice.message,
            finish_reason=choice.finish_reason,
            token_ids=_from_bytes("i", choice.token_ids).tolist(),
            logprobs=_from_bytes("f", choice.logprobs).tolist(),
        )
        for choice in payload.choices
    ]


def _pack_choice(choice: Choice) -> PackedChoice:
    if len(choice.token_ids) != len(choice.logprobs):
        raise ValueError(f"{len(choice.token_ids)} ids with {len(choice.logprobs)} log-probs")
    return PackedChoice(
        index=choice.index,
        message=choice.message,
        finish_reason=choice.finish_reason,
        token_ids=_to_bytes("i", choice.token_ids),
        logprobs=_to_bytes("f", choice.logprobs),
    )


def _to_bytes(code: str, values: Sequence[float]) -> bytes:
    packed = array(code, values)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _from_bytes(code: str, data: bytes) -> array[Any]:
    values = array(code)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
