"""Names of trajectories, the renderer against transformers, and joining turns id for id."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout import trajectories
from rollout.records import Choice
from rollout.trajectories import Break, Joined, PromptRenderer, context_hash
from tests.fixtures import rows

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add 1. \u00e9\u4e16"}]
ANSWER = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "2"}


@pytest.fixture(scope="session")
def renderer(tiny_tokenizer: Path) -> PromptRenderer:
    return PromptRenderer(tiny_tokenizer)


def turn(renderer: PromptRenderer, sampled: str, finish: str, message: dict[str, Any]) -> Any:
    return rows.completion(
        "c1",
        messages=ASKED,
        tools=TOOLS,
        prompt_token_ids=renderer.prompt_ids(ASKED, TOOLS),
        choices=[
            Choice(
                index=0,
                message=message,
                finish_reason=finish,
                token_ids=(ids := renderer.encode(sampled)),
                logprobs=[-1.0] * len(ids),
            )
        ],
    )


def test_renders_as_transformers_does(renderer: PromptRenderer, tiny_tokenizer: Path) -> None:
    from transformers import AutoTokenizer

    messages: list[dict[str, Any]] = [*ASKED, ANSWER, RESULT]
    parsed: list[dict[str, Any]] = [
        *ASKED,
        {**ANSWER, "content": "", "tool_calls": [json.loads(json.dumps(CALL))]},
        RESULT,
    ]
    parsed[2]["tool_calls"][0]["function"]["arguments"] = {"a": 1}
    theirs = AutoTokenizer.from_pretrained(tiny_tokenizer).apply_chat_template(
        parsed, tools=TOOLS, add_generation_prompt=True, return_dict=False
    )
    assert renderer.prompt_ids(messages, TOOLS) == theirs


def test_a_joined_prompt_is_the_earlier_ids_and_what_follows(renderer: PromptRenderer) -> None:
    # Sampled with other spacing than the template's: the ids must survive, the text would not.
    earlier = turn(
        renderer,
        '<tool_call>{"name":"add",  "arguments": {"a":1}}</tool_call><|im_end|>',
        "tool_calls",
        ANSWER,
    )
    joined = trajectories.join(renderer, earlier, earlier.choices[0], [*ASKED, ANSWER, RESULT], 2)
    assert isinstance(joined, Joined)
    before = [*earlier.prompt_token_ids, *earlier.choices[0].token_ids]
    assert joined.prompt_token_ids[: len(before)] == before
    rest = "".join(renderer.text(token) for token in joined.prompt_token_ids[len(before) :])
    assert rest == "\n<|im_start|>tool\n<tool_response>2</tool_response><|im_end|>\n<|im_start|>assistant\n"


def test_an_answer_cut_by_length_is_closed_in_the_next_prompt(renderer: PromptRenderer) -> None:
    message = {"role": "assistant", "content": "Let me"}
    earlier = turn(renderer, "Let me", "length", message)
    more = [*ASKED, message, {"role": "user", "content": "Go on."}]
    joined = trajectories.join(renderer, earlier, earlier.choices[0], more, 2)
    assert isinstance(joined, Joined)
    assert joined.prompt_token_ids == renderer.prompt_ids(more, TOOLS)


@pytest.mark.parametrize(
    ("sampled", "finish", "after", "reason"),
    [
        ("Let me STOP", "stop", [{"role": "user", "content": "x"}], "stop string"),
        ("Let me<|im_end|>", "stop", [], "ends with an assistant message"),
    ],
)
def test_what_cannot_be_joined_says_why(
    renderer: PromptRenderer, sampled: str, finish: str, after: list[dict[str, Any]], reason: str
) -> None:
    message = {"role": "assistant", "content": "Let me"}
    earlier = turn(renderer, sampled, finish, message)
    broken = trajectories.join(renderer, earlier, earlier.choices[0], [*ASKED, message, *after], 2)
    assert isinstance(broken, Break)
    assert reason in broken.reason


def test_a_template_that_forgets_cannot_be_joined(tiny_tokenizer: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_tokenizer / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}:{{ m.content if loop.last else 'gone' }}<|im_end|>{% endfor %}"
    )
    forgetful = PromptRenderer(tmp_path)
    message = {"role": "assistant", "content": "yes"}
    earlier = turn(forgetful, "yes<|im_end|>", "stop", message)
    broken = trajectories.join(
        forgetful, earlier, earlier.choices[0], [*ASKED, message, {"role": "user", "content": "x"}], 2
    )
    assert isinstance(broken, Break)
    assert "differently" in broken.reason


def test_a_template_that_fails_is_a_break_with_its_kind(tiny_tokenizer: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_tokenizer / name).read_bytes())
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}<|im_end|>{% if m.content == 'odd' %}{{ m.content + 1 }}"
        "{% elif m.content == 'no' %}{{ raise_exception('never') }}{% endif %}{% endfor %}"
    )
    strict = PromptRenderer(tmp_path)
    message = {"role": "assistant", "content": "yes"}
    earlier = turn(strict, "yes<|im_end|>", "stop", message)
    for said, kind in (("odd", "TypeError"), ("no", "TemplateError")):
        more = [*ASKED, message, {"role": "user", "content": said}]
        broken = trajectories.join(strict, earlier, earlier.choices[0], more, 2)
        assert broken == Break(f"the chat template failed: {kind}")


@pytest.mark.parametrize("arguments", ["9" * 5000, "[" * 100_000, "{", ""])
def test_arguments_that_are_no_object_join_as_none(renderer: PromptRenderer, arguments: str) -> None:
    odd = {**ANSWER, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": arguments}}]}
    earlier = turn(renderer, "<tool_call>...</tool_call><|im_end|>", "tool_calls", odd)
    joined = trajectories.join(renderer, earlier, earlier.choices[0], [*ASKED, odd, RESULT], 2)
    assert isinstance(joined, Joined)


def test_the_context_is_the_same_however_the_caller_spells_it() -> None:
    ours = context_hash("p", TOOLS, [*ASKED, ANSWER])
    by_sdk = {
        **ANSWER,
        "content": "",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
    }
    in_parts = {"role": "user", "content": [{"type": "text", "text": ASKED[1]["content"]}]}
    assert context_hash("p", TOOLS, [ASKED[0], in_parts, by_sdk]) == ours


@pytest.mark.parametrize(
    "other",
    [
        ("q", TOOLS, [*ASKED, ANSWER]),
        ("p", None, [*ASKED, ANSWER]),
        ("p", TOOLS, ASKED),
        ("p", TOOLS, [*ASKED, {**ANSWER, "content": "so"}]),
        ("p", TOOLS, [*ASKED, {**ANSWER, "tool_calls": [{**CALL, "id": "call_2"}]}]),
        (
            "p",
            TOOLS,
            [
                *ASKED,
                {**ANSWER, "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"a":1}'}}]},
            ],
        ),
    ],
)
def test_another_context_has_another_hash(other: tuple[str, Any, Any]) -> None:
    assert context_hash(*other) != context_hash("p", TOOLS, [*ASKED, ANSWER])


def test_names_in_their_order() -> None:
    assert trajectories.named({"trajectory_id": "a"}, "b") == "a"
    assert trajectories.named({}, "b") == "b"
    assert trajectories.named({}, None) is None
