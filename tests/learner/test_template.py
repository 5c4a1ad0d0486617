"""The chat template renders alike everywhere, and every message independently of its neighbours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from learner.batch import common_prefix
from rollout import tasks
from rollout.trajectories import PromptRenderer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Current weather.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "its name"},
                    "unit": {"type": "string", "enum": ["c", "f"]},
                    "days": {"type": "array", "items": {"type": "integer"}},
                    "who": {"type": ["string", "null"]},
                    "at": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
CALL: dict[str, Any] = {
    "id": "1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Orl\u00e9ans <x> & \'y\'"}'},
}
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in Orl\u00e9ans?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "7 C"},
    {"role": "assistant", "content": "It is 7."},
]


def render_plainly(template: str, messages: list[dict[str, Any]], tools: Any, prompt: bool) -> str:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    return environment.from_string(template).render(
        messages=messages, tools=tools, add_generation_prompt=prompt
    )


@pytest.mark.parametrize("tools", [TOOLS, None])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("prompt", [True, False])
def test_transformers_and_plain_jinja_render_alike(
    tiny_tokenizer: Path, tools: Any, first: int, prompt: bool
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer)
    theirs = tokenizer.apply_chat_template(
        CONVERSATION[first:], tools=tools, tokenize=False, add_generation_prompt=prompt
    )
    assert theirs == render_plainly(tokenizer.chat_template, CONVERSATION[first:], tools, prompt)


def test_tools_are_signatures_and_calls_are_json(tiny_tokenizer: Path) -> None:
    text = PromptRenderer(tiny_tokenizer).render(CONVERSATION, TOOLS, generation_prompt=False)
    assert (
        '- get_weather(city: string (its name), unit?: "c"|"f", days?: array of integer, who?: string|null, '
        'at?: {"anyOf": [{"type": "string"}, {"type": "integer"}]}): Current weather.\n- now()<|im_end|>'
    ) in text
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Orl\u00e9ans <x> & \'y\'"}}</tool_call>'
    assert f"<|im_start|>assistant\n{call}\n{call}<|im_end|>\n" in text
    assert "<|im_start|>tool\n<tool_response>7 C</tool_response><|im_end|>\n" in text


def test_content_parts_render_as_the_joined_string(tiny_tokenizer: Path) -> None:
    renderer = PromptRenderer(tiny_tokenizer)
    template = (tiny_tokenizer / "chat_template.jinja").read_text()
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    joined = [{"role": "user", "content": "a\nb"}]
    assert render_plainly(template, parts, None, True) == render_plainly(template, joined, None, True)
    assert renderer.render(parts, None, generation_prompt=True) == renderer.render(
        joined, None, generation_prompt=True
    )


def test_a_longer_conversation_only_appends(tiny_tokenizer: Path) -> None:
    renderer = PromptRenderer(tiny_tokenizer)
    for end in range(1, len(CONVERSATION)):
        shorter = renderer.render(CONVERSATION[:end], TOOLS, generation_prompt=False)
        assert renderer.render(CONVERSATION[: end + 1], TOOLS, generation_prompt=False).startswith(shorter)


def test_the_text_before_the_tools_is_constant(tiny_tokenizer: Path) -> None:
    renderer = PromptRenderer(tiny_tokenizer)
    prompts = [
        renderer.prompt_ids(task.messages, task.tools)
        for task in (tasks.generate(seed, "train") for seed in range(60))
    ]
    shared = common_prefix(min(prompts), max(prompts), 300)
    assert shared >= 32, "engines cache the common beginning in blocks of 32 tokens"


def test_arguments_render_alike_as_text_and_as_object(tiny_tokenizer: Path) -> None:
    template = (tiny_tokenizer / "chat_template.jinja").read_text()
    parsed = json.loads(CALL["function"]["arguments"])
    as_object = {**CALL, "function": {**CALL["function"], "arguments": parsed}}
    one, other = (
        render_plainly(template, [{"role": "assistant", "content": "", "tool_calls": [call]}], None, False)
        for call in (CALL, as_object)
    )
    assert one == other
