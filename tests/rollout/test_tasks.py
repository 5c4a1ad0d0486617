"""Generated tasks: reproducible, disjoint between splits, short, and solvable as demonstrated."""

from __future__ import annotations

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jinja2 import Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from rollout.tasks import Task, demonstration, from_id, generate
from rollout.tasks.tool_use import FAMILIES, TOOLSETS
from rollout.tasks.values import POOLS
from rollout.tasks.world import TOOLS, World

SEEDS = range(1500)
PROMPT_LIMIT = 300
PINNED_TRAIN = "Tell me the balance of emergency."
PINNED_HELD_OUT = "What does a printer cost?"


@pytest.fixture(scope="module")
def tokenizer(tiny_moe: Path) -> Tokenizer:
    """The served model's tokenizer; the tiny model of the tests has the same one."""
    return Tokenizer.from_file(str(tiny_moe / "tokenizer.json"))


def question(task: Task) -> str:
    return str(task.messages[-1]["content"])


@functools.cache
def template() -> Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    return environment.from_string(Path("learner/chat_template.jinja").read_text())


def rendered(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    return template().render(messages=messages, tools=tools, add_generation_prompt=True)


def test_a_seed_gives_the_same_task_for_ever() -> None:
    assert generate(7, "train") == generate(7, "train")
    task = generate(12, "held_out")
    assert task.id == f"tool_use/held_out/{task.family}/12"
    assert from_id(task.id) == task
    # Pinned: a change of the generator changes every published figure, so it must be meant.
    assert question(generate(0, "train")) == PINNED_TRAIN
    assert question(generate(0, "held_out")) == PINNED_HELD_OUT


@pytest.mark.parametrize(
    "bad",
    ["tool_use/train/timer/x", "tool_use/test/timer/1", "nothing/train/timer/1", "tool_use/train/1", ""],
)
def test_an_id_that_names_no_task_is_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r"unknown|not DOMAIN"):
        from_id(bad)


def test_an_id_whose_family_is_another_is_refused() -> None:
    wrong = "price" if generate(1, "train").family != "price" else "timer"
    with pytest.raises(ValueError, match="is of family"):
        from_id(f"tool_use/train/{wrong}/1")


def test_the_splits_share_no_question_and_no_value() -> None:
    train = {question(generate(seed, "train")) for seed in range(8_000)}
    held_out = {question(generate(seed, "held_out")) for seed in range(3_000)}
    assert not train & held_out
    for name, (for_training, for_judging) in POOLS.items():
        assert not set(for_training) & set(for_judging), name


def test_the_mix_is_a_third_multi_turn_with_calls_and_no_calls() -> None:
    tasks = [generate(seed, "train") for seed in SEEDS]
    kinds = Counter("none" if not t.goal.turns else "one" if t.max_turns == 1 else "many" for t in tasks)
    assert 0.30 <= kinds["many"] / len(tasks) <= 0.40
    assert kinds["none"] / len(tasks) >= 0.10
    assert {t.max_turns for t in tasks if t.goal.turns} == {1, 2, 3}
    assert {t.family for t in tasks} == set(FAMILIES)


def test_two_or_three_of_at_least_ten_tools_are_offered() -> None:
    assert len(TOOLS) >= 10
    assert all(2 <= len(offered) <= 3 for offered in TOOLSETS.values())
    for seed in SEEDS:
        task = generate(seed, "held_out")
        offered = {tool["function"]["name"] for tool in task.tools}
        assert {call.name for turn in task.goal.turns for call in turn} <= offered


def test_a_demonstration_is_answered_by_the_tools_without_error() -> None:
    for split in ("train", "held_out"):
        for seed in SEEDS:
            task = generate(seed, split)
            shown = demonstration(task)
            assert sum(message["role"] == "assistant" for message in shown) == task.max_turns
            assert shown[-1]["role"] == "assistant"
            world = World(task.world)
            for turn in task.goal.turns:
                for call in turn:
                    assert "error" not in world.execute(call.name, call.arguments), task


def test_what_an_answer_must_mention_is_in_the_gold_answer() -> None:
    for seed in SEEDS:
        goal = generate(seed, "held_out").goal
        said = (goal.answer or "").casefold()
        assert all(any(text.casefold() in said for text in group) for group in goal.mentions)


def test_prompts_stay_under_the_limit(tokenizer: Tokenizer) -> None:
    """Every prompt of every gold episode, later turns with their tool results included."""
    for split in ("train", "held_out"):
        for seed in range(400):
            task = generate(seed, split)
            messages = task.messages + demonstration(task)
            for position, message in enumerate(messages):
                if message["role"] == "assistant":
                    prompt = rendered(messages[:position], task.tools)
                    assert len(tokenizer.encode(prompt).ids) <= PROMPT_LIMIT, prompt


def test_the_constant_part_comes_first() -> None:
    heads: dict[str, set[str]] = {}
    for seed in SEEDS:
        task = generate(seed, "train")
        names = ",".join(tool["function"]["name"] for tool in task.tools)
        heads.setdefault(names, set()).add(rendered(task.messages, task.tools).split(question(task))[0])
    assert len(heads) == len(TOOLSETS)
    assert all(len(constant) == 1 for constant in heads.values())


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("nothing", {}),
        ("set_timer", {}),
        ("set_timer", {"minutes": "soon"}),
        ("set_timer", {"minutes": 1.5}),
        ("set_timer", {"minutes": True}),
        ("set_timer", {"minutes": 5, "label": "tea"}),
        ("set_timer", ["minutes", 5]),
        ("set_timer", {"minutes": float("inf")}),
        ("set_timer", {"minutes": float("nan")}),
        ("convert_currency", {"amount": float("inf"), "from": "USD", "to": "JPY"}),
        ("convert_currency", {"amount": 1e308, "from": "USD", "to": "JPY"}),
        ("convert_currency", {"amount": "1e999", "from": "USD", "to": "JPY"}),
        ("get_weather", {"city": {"name": "Paris"}}),
        ("get_price", {"item": "unicorn"}),
        ("convert_currency", {"amount": 1, "from": "USD", "to": "gold"}),
    ],
)
def test_a_bad_call_is_answered_and_changes_nothing(name: str, arguments: Any) -> None:
    world = World({"prices": {"lamp": 5}})
    assert set(world.execute(name, arguments)) == {"error"}
    assert world.tables == {"prices": {"lamp": 5}}


WORDS = st.sampled_from(["USD", "JPY", "paris", "lamp", "savings", "-1e999", "\ud800"])
NUMBERS = st.sampled_from([5, 1e308, 1.7e308, 5e-324, 10**400, float("inf"), float("nan")])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | NUMBERS | WORDS | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


def calls() -> st.SearchStrategy[tuple[str, Any]]:
    """A tool and arguments: of the right names and kinds, of the right names, or any."""
    return st.sampled_from(sorted(TOOLS)).flatmap(
        lambda name: st.tuples(
            st.just(name),
            st.fixed_dictionaries(
                {key: WORDS if kind == "string" else NUMBERS for key, kind in TOOLS[name].parameters.items()}
            )
            | st.fixed_dictionaries({key: VALUES for key in TOOLS[name].parameters})
            | VALUES,
        )
    )


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(made=st.lists(calls(), max_size=4))
@example(made=[("convert_currency", {"amount": 1e308, "from": "USD", "to": "JPY"})])
def test_whatever_json_a_model_sends_is_answered_in_json(made: list[tuple[str, Any]]) -> None:
    world = World({"accounts": {"savings": 1e308}, "prices": {"lamp": 5}, "weather": {"paris": "sunny"}})
    for name, arguments in made:
        answer = world.execute(name, json.loads(json.dumps(arguments)))
        assert json.loads(json.dumps(answer, allow_nan=False)) == answer


def test_a_world_does_not_touch_its_task() -> None:
    task = next(t for s in SEEDS if (t := generate(s, "train")).family == "transfer")
    before = generate(int(task.id.rsplit("/", 1)[1]), "train")
    demonstration(task)
    assert task == before
