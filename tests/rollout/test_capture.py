"""What a record holds of an exchange, whole or streamed, and when it may train."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout import capture
from rollout.capture import Recorder, Request
from rollout.records import Capture, CompletionStatus, Joint, Project


@dataclass(frozen=True)
class Piece:
    index: int
    token_ids: list[int]
    logprobs: list[float] = field(default_factory=list)


def request(**changes: Any) -> Request:
    values: dict[str, Any] = {
        "id": "chatcmpl-1",
        "project_id": "default",
        "key_id": "key-1",
        "created_at": 1.0,
        "trajectory_id": "t",
        "turn": 0,
        "task": None,
        "model": "ratchet",
        "policy_id": "p000001",
        "tier": "standard",
        "replica_id": "standard-0",
        "messages": [{"role": "user", "content": "hi"}],
        "tools": None,
        "params": {"temperature": 1.0},
        "joint": Joint.START,
    }
    return Request(**(values | changes))


def chunk(index: int, delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": finish}]}


def finished(recorder: Recorder, **usage: int) -> Any:
    recorder.count({"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5} | usage)
    return recorder.completion(status=CompletionStatus.COMPLETED, ttft_ms=1.0, latency_ms=2.0)


def streamed(**changes: Any) -> Recorder:
    recorder = Recorder(request(**changes))
    recorder.prompt([7, 8])
    recorder.prompt([7, 8])  # the engine repeats it on the first chunk of each choice
    for text, ids, finish in [("he", [1], None), ("llo", [2, 3], "stop")]:
        recorder.chunk(chunk(0, {"content": text}, finish))
        recorder.pieces([Piece(0, ids, [-0.5] * len(ids))])
    return recorder


def test_a_stream_becomes_one_trainable_record() -> None:
    record = finished(streamed())
    assert record.status is CompletionStatus.COMPLETED
    assert record.trainable
    assert record.untrainable_reason is None
    assert record.prompt_token_ids == [7, 8]
    assert record.choices[0].token_ids == [1, 2, 3]
    assert record.choices[0].message == {"role": "assistant", "content": "hello"}
    assert record.choices[0].finish_reason == "stop"


def test_a_whole_body_gives_the_same_record_as_its_stream() -> None:
    recorder = Recorder(request())
    recorder.prompt([7, 8])
    recorder.pieces([Piece(0, [1, 2, 3], [-0.5] * 3)])
    message: dict[str, Any] = {"role": "assistant", "content": "hello", "refusal": None, "tool_calls": []}
    recorder.body({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    assert finished(recorder) == finished(streamed())


def test_tool_call_fragments_are_put_together() -> None:
    recorder = Recorder(request())
    for part in (
        {"index": 0, "id": "call_1", "type": "function", "function": {"name": "add", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a": '}},
        {"index": 0, "function": {"arguments": "1}"}},
    ):
        recorder.chunk(chunk(0, {"tool_calls": [part]}))
    recorder.chunk(chunk(0, {}, "tool_calls"))
    message = (
        recorder.completion(status=CompletionStatus.ERROR, ttft_ms=None, latency_ms=1.0).choices[0].message
    )
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert message == {"role": "assistant", "content": None, "tool_calls": [call]}


@settings(deadline=None)
@given(extra_ids=st.integers(0, 3), extra_usage=st.integers(-2, 3), extra_prompt=st.integers(-1, 2))
def test_counts_that_disagree_never_train(extra_ids: int, extra_usage: int, extra_prompt: int) -> None:
    recorder = streamed()
    recorder.pieces([Piece(0, [9] * extra_ids, [])])
    record = finished(recorder, completion_tokens=3 + extra_usage, prompt_tokens=2 + extra_prompt)
    agree = extra_ids == 0 and extra_usage == 0 and extra_prompt == 0
    assert record.trainable is agree
    if not agree:
        assert record.status is CompletionStatus.ERROR
        assert record.error.startswith("capture_mismatch")
    for choice in record.choices:
        assert len(choice.token_ids) == len(choice.logprobs)


def test_a_missing_logprob_and_a_changed_prompt_are_mismatches() -> None:
    recorder = streamed()
    recorder.pieces([Piece(0, [4], [capture.MISSING_LOGPROB])])
    assert "missing log-prob" in (finished(recorder, completion_tokens=4).error or "")
    recorder = streamed()
    recorder.expected_prompt = [7, 9]
    assert "joined prompt" in (finished(recorder).error or "")


def test_a_caller_who_left_does_not_train() -> None:
    record = streamed().completion(status=CompletionStatus.CANCELLED, ttft_ms=None, latency_ms=1.0)
    assert (record.status, record.trainable) == (CompletionStatus.CANCELLED, False)
    assert record.untrainable_reason == "cancelled by the caller"
    assert record.usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({}, None),
        ({"temperature": 0.7, "n": 4, "seed": 1, "stop": ["x"]}, None),
        ({"top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0, "tool_choice": "auto"}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"temperature": 0}, "greedy"),
        ({"top_p": 0.9}, "top_p"),
        ({"top_k": 20}, "top_k"),
        ({"min_p": 0.1}, "min_p"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ],
)
def test_trainable_only_at_temperature_alone(params: dict[str, Any], reason: str | None) -> None:
    found = capture.bent_by(params, None)
    assert found is None if reason is None else reason in (found or "")


def test_strict_tools_are_grammar() -> None:
    assert capture.bent_by({}, [{"type": "function", "function": {"name": "f"}}]) is None
    assert capture.bent_by({}, [{"type": "function", "function": {"name": "f", "strict": True}}])


@pytest.mark.parametrize("setting", list(Capture))
@pytest.mark.parametrize("store", [None, True, False])
def test_store_false_always_wins(setting: Capture, store: bool | None) -> None:
    kept = capture.wanted(Project(id="p", name="p", capture=setting), store)
    if store is False or setting is Capture.OFF:
        assert not kept
    else:
        assert kept is (setting is Capture.ON or store is True)
