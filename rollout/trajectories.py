"""Which trajectory a request belongs to, and how its prompt continues the turn before, id for id.

Text does not round-trip: parsers re-write tool calls, so a prompt rendered again from messages is not what
the model saw and said. For a known turn the next prompt is therefore

    prompt ids of that turn + the ids it sampled + ids of what the template puts after it

where the last part is the difference of two renderings. Invariant: a `Joined` prompt starts with the
earlier ids unchanged; where that cannot be had, the result is a `Break` that says why.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import msgspec
from jinja2 import ext, nodes, parser, sandbox
from tokenizers import Tokenizer

from rollout.records import Choice, Completion

log = logging.getLogger(__name__)
SESSION_HEADER = "x-session-id"
NAME_KEY = "trajectory_id"
"""In a request's metadata."""
NAME_CHARACTERS = 256
"""Longest name of a trajectory."""

Message = dict[str, Any]


@dataclass(slots=True, frozen=True)
class Joined:
    """The prompt that continues an earlier turn."""

    prompt_token_ids: list[int]


@dataclass(slots=True, frozen=True)
class Break:
    """The prompt cannot continue the earlier turn; the engine renders the messages instead."""

    reason: str


def named(metadata: Mapping[str, str], session: str | None) -> str | None:
    """The name the caller gave the trajectory: metadata, then session header."""
    return metadata.get(NAME_KEY) or session or None


def can_be_named(name: str) -> bool:
    """Whether a trajectory can have this name: an index has to hold it, and a header to say it."""
    return len(name) <= NAME_CHARACTERS and name.isprintable()


def text_of(content: Any) -> str:
    """Message content as one string; text parts are joined by newlines, as the engine joins them."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "\n".join(part if isinstance(part, str) else part.get("text") or "" for part in content)


def context_hash(project_id: str, tools: list[dict[str, Any]] | None, messages: Sequence[Message]) -> str:
    """Names a conversation up to and including its last message, however the caller spelled it.

    Arguments of tool calls are compared as the strings that were sent; keys that SDKs add to a message
    (``refusal``, ``annotations``) do not count.
    """
    normal = (project_id, tools or [], [_essence(message) for message in messages])
    return hashlib.sha256(msgspec.json.encode(normal, order="sorted")).hexdigest()


def contexts(completion: Completion) -> list[str]:
    """Context hashes under which later requests find each choice of a completion, in order of choices."""
    return [
        context_hash(completion.project_id, completion.tools, [*completion.messages, choice.message])
        for choice in completion.choices
    ]


def last_answer(messages: Sequence[Message]) -> int | None:
    """Index of the last assistant message; None in a fresh conversation."""
    return next((i for i in reversed(range(len(messages))) if messages[i].get("role") == "assistant"), None)


def join(
    renderer: PromptRenderer,
    earlier: Completion,
    choice: Choice,
    messages: Sequence[Message],
    answer: int,
) -> Joined | Break:
    """Continue `choice` of `earlier`, which is ``messages[answer]`` of the new request."""
    if not earlier.prompt_token_ids or not choice.token_ids:
        return Break("no ids were captured for the turn before")
    if answer == len(messages) - 1:
        return Break("the conversation ends with an assistant message")
    try:
        suffix = renderer.suffix(messages, answer, earlier.tools, _ending(renderer, choice))
    except Exception as error:
        log.exception("%s: the turn after it cannot be rendered", earlier.id)
        return Break(f"the chat template failed: {type(error).__name__}")
    if isinstance(suffix, Break):
        return suffix
    return Joined([*earlier.prompt_token_ids, *choice.token_ids, *suffix])


def _ending(renderer: PromptRenderer, choice: Choice) -> str | None:
    """How the sampled ids end: the stop token's text, "" when cut by length, None by a stop string."""
    if choice.token_ids[-1] in renderer.stop_ids:
        return renderer.text(choice.token_ids[-1])
    return "" if choice.finish_reason == "length" else None


def _essence(message: Message) -> list[Any]:
    calls = [
        [
            call.get("id"),
            (call.get("function") or {}).get("name"),
            (call.get("function") or {}).get("arguments"),
        ]
        for call in message.get("tool_calls") or []
    ]
    return [
        message.get("role"),
        text_of(message.get("content")),
        calls,
        message.get("tool_call_id"),
        message.get("name"),
    ]


class PromptRenderer:
    """The model folder's chat template and tokenizer, without transformers.

    Environment and filters equal those of ``transformers.apply_chat_template``, message and tool
    preparation those of the engine, so `prompt_ids` of a fresh conversation are the engine's own.
    """

    def __init__(self, model_dir: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        settings = json.loads((model_dir / "tokenizer_config.json").read_text())
        self._template = _environment().from_string(_template_text(model_dir, settings))
        self._special = {
            name: _token_text(settings[name])
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if settings.get(name) is not None
        }
        eos = self._tokenizer.token_to_id(self._special["eos_token"])
        assert eos is not None
        self.stop_ids: set[int] = _stop_ids(model_dir) or {eos}

    def text(self, token_id: int) -> str:
        """A single token as text, special ones included."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def render(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None, *, generation_prompt: bool
    ) -> str:
        """The conversation as text. Raises jinja2.TemplateError when the template refuses it."""
        return self._template.render(
            messages=[_prepared(message) for message in messages],
            tools=[_prepared_tool(tool) for tool in tools] if tools else None,
            add_generation_prompt=generation_prompt,
            **self._special,
        )

    def prompt_ids(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> list[int]:
        return self.encode(self.render(messages, tools, generation_prompt=True))

    def suffix(
        self,
        messages: Sequence[Message],
        answer: int,
        tools: list[dict[str, Any]] | None,
        ending: str | None,
    ) -> list[int] | Break:
        """Ids that follow the sampled ids of ``messages[answer]`` in the next prompt.

        `ending`: text of the stop token that was sampled last, "" when the answer was cut by length
        (the template's own closing is added then), None when a stop string cut it.
        """
        if ending is None:
            return Break("a stop string cut the turn before")
        until = self.render(messages[: answer + 1], tools, generation_prompt=False)
        whole = self.render(messages, tools, generation_prompt=True)
        if not whole.startswith(until):
            return Break("the template renders earlier turns differently later on")
        closing = ending or self._special["eos_token"]
        at = until.rfind(closing)
        if at < 0 or until[at + len(closing) :].strip():
            return Break("the template does not close the turn with the token that was sampled")
        return self.encode(until[at + len(ending) if ending else at :] + whole[len(until) :])


def _prepared(message: Message) -> Message:
    """A message as the engine hands it to the template: text content, arguments as objects."""
    prepared: Message = {"role": message["role"], "content": text_of(message.get("content"))}
    if calls := message.get("tool_calls"):
        prepared["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _arguments(call["function"])}}
            for call in calls
        ]
    for key in ("tool_call_id", "name", "reasoning"):
        if message.get(key) is not None:
            prepared[key] = message[key]
    return prepared


def _arguments(function: dict[str, Any]) -> dict[str, Any]:
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, RecursionError):  # no JSON, an integer of thousands of digits, nested too deep
        return {}  # what the engine makes of malformed history; only the text after it matters here
    return arguments if isinstance(arguments, dict) else {}


def _prepared_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    prepared = {key: function.get(key) for key in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        prepared["strict"] = function["strict"]
    return {"type": "function", "function": prepared}


def _template_text(model_dir: Path, settings: dict[str, Any]) -> str:
    file = model_dir / "chat_template.jinja"
    if file.exists():
        return file.read_text()
    template = settings.get("chat_template")
    if not isinstance(template, str):
        raise ValueError(f"{model_dir} has no chat template")
    return template


def _token_text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _stop_ids(model_dir: Path) -> set[int]:
    """Ids that end a turn, from ``generation_config.json``."""
    file = model_dir / "generation_config.json"
    if not file.exists():
        return set()
    stop = json.loads(file.read_text()).get("eos_token_id")
    return set(stop) if isinstance(stop, list) else {stop} - {None}


class _Generation(ext.Extension):
    """Accepts ``{% generation %}`` blocks, which mark assistant text and change nothing else."""

    tags = {"generation"}

    def parse(self, parser: parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> sandbox.ImmutableSandboxedEnvironment:
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
