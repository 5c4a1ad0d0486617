"""Answers of a real engine: right after every swap, right in every mixture, and captured token for token."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from server.engine.client import ChatResult, Engine, Piece
from server.engine.errors import EngineRejected
from server.engine.launch import BASE_MODEL
from tests.fixtures.engines import RunningEngine
from tests.fixtures.models import HIDDEN, write_adapter

pytestmark = pytest.mark.engine

PROMPTS = (
    "Name a colour.",
    "What is the capital of France, and how many people live there?",
    "def add(a, b):",
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"day": {"type": "integer"}}, "required": ["day"]},
    },
}
TOOL_CALL = r'<tool_call>\n\{"name": "weather", "arguments": \{"day": [0-9]{1,3}\}\}\n</tool_call>'


def request(prompt: str = PROMPTS[0], **fields: Any) -> dict[str, Any]:
    body = {"model": BASE_MODEL, "messages": [{"role": "user", "content": prompt}]}
    return body | {"temperature": 0, "max_tokens": 12} | fields


def run(running: RunningEngine, test: Callable[[Engine], Awaitable[None]]) -> None:
    async def with_client() -> None:
        async with running.client() as engine:
            await test(engine)

    asyncio.run(with_client())


@asynccontextmanager
async def loaded(engine: Engine, adapters: dict[str, Path]) -> AsyncIterator[list[str]]:
    for name, path in adapters.items():
        await engine.load_adapter(name, path)
    try:
        yield list(adapters)
    finally:
        for name in await engine.models() - {BASE_MODEL}:
            await engine.unload_adapter(name)


async def answer(engine: Engine, **fields: Any) -> Piece:
    (piece,) = (await engine.chat(request(**fields))).choices
    return piece


async def streamed(
    engine: Engine, body: dict[str, Any]
) -> tuple[list[int], dict[int, Piece], dict[int, str], Any]:
    """Prompt ids, pieces joined by choice, what a caller would have put together, usage."""
    prompt: list[int] = []
    pieces: dict[int, list[Piece]] = {}
    texts: dict[int, str] = {}
    usage = None
    async for event in engine.stream_chat(body):
        prompt = prompt or event.prompt_token_ids or []
        usage = event.usage or usage
        for piece in event.pieces:
            pieces.setdefault(piece.index, []).append(piece)
        for choice in event.chunk["choices"]:
            assert "token_ids" not in choice
            assert "logprobs" not in choice
            text = choice["delta"].get("content") or ""
            for call in choice["delta"].get("tool_calls") or []:
                text += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return prompt, {index: join(parts) for index, parts in pieces.items()}, texts, usage


def join(parts: list[Piece]) -> Piece:
    return Piece(
        index=parts[0].index,
        token_ids=list(itertools.chain.from_iterable(part.token_ids for part in parts)),
        logprobs=list(itertools.chain.from_iterable(part.logprobs for part in parts)),
        logprobs_content=list(itertools.chain.from_iterable(part.logprobs_content for part in parts)),
    )


def assert_same(one: Piece, other: Piece) -> None:
    assert one.token_ids == other.token_ids
    assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def transformers_logprobs(model: Path, adapter: Path | None, ids: list[int]) -> list[float]:
    """What another implementation says of `ids`, from the second on."""
    import torch
    from peft import PeftModel
    from transformers import MixtralForCausalLM

    reference: Any = MixtralForCausalLM.from_pretrained(model, dtype=torch.float32)
    if adapter is not None:
        reference = PeftModel.from_pretrained(reference, str(adapter))
    with torch.no_grad():
        logits = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [float(logits[i, token]) for i, token in enumerate(ids[1:])]


def test_a_seed_holds_however_a_prompt_is_cut(engine_standard: RunningEngine) -> None:
    bodies = [
        request(f"{number}: " + "word " * 300, temperature=1, seed=number, max_tokens=8)
        for number in range(4)
    ]

    async def test(engine: Engine) -> None:
        together = await asyncio.gather(*(engine.chat(body) for body in bodies))
        alone = [await engine.chat(body) for body in bodies]
        assert [a.choices[0].token_ids for a in together] == [b.choices[0].token_ids for b in alone]

    run(engine_standard, test)


def test_base_and_adapters_agree_with_transformers(
    engine_standard: RunningEngine, tiny_moe: Path, tiny_adapters: dict[str, Path]
) -> None:
    async def check(engine: Engine) -> None:
        async with loaded(engine, tiny_adapters) as names:
            # Conversations on which no router comes within 1e-5 of a tie: there, both answers are right.
            ids = await engine.tokenize([{"role": "user", "content": PROMPTS[1]}], None)
            for name in (BASE_MODEL, *names):
                scored = await engine.score(name, ids)
                assert scored[0] is None
                want = transformers_logprobs(tiny_moe, tiny_adapters.get(name), ids)
                assert scored[1:] == pytest.approx(want, abs=1e-4), name

    run(engine_standard, check)


def test_a_mixed_batch_answers_as_each_alone(
    engine_standard: RunningEngine, tiny_adapters: dict[str, Path]
) -> None:
    async def check(engine: Engine) -> None:
        async with loaded(engine, tiny_adapters) as names:
            # Every slot is taken, and the base is asked too.
            cases = list(itertools.product((BASE_MODEL, *names), PROMPTS))
            alone = {case: await answer(engine, model=case[0], prompt=case[1]) for case in cases}
            assert len({tuple(piece.token_ids) for piece in alone.values()}) == len(cases)
            for order in (cases, cases[::-1], sorted(cases, key=lambda case: case[1])):
                mixed = await asyncio.gather(*[answer(engine, model=m, prompt=p) for m, p in order])
                for case, piece in zip(order, mixed, strict=True):
                    assert_same(piece, alone[case])

    run(engine_standard, check)


def test_swapped_adapters_answer_as_when_first_loaded(
    engine_standard: RunningEngine, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    async def check(engine: Engine) -> None:
        first: dict[str, Piece] = {}
        for name, path in tiny_adapters.items():
            async with loaded(engine, {name: path}):
                first[name] = await answer(engine, model=name)
        base = await answer(engine)
        # More loads than an engine has slots or memory for, under names that move from slot to slot.
        for lap in range(3):
            for name, path in tiny_adapters.items():
                async with loaded(
                    engine, {f"{name}.{lap}": path, "other": next(iter(tiny_adapters.values()))}
                ):
                    assert_same(await answer(engine, model=f"{name}.{lap}"), first[name])
        assert_same(await answer(engine), base)

    run(engine_standard, check)


def test_full_weights_swap_there_and_back(
    engine_standard: RunningEngine,
    engine_other: RunningEngine,
    tiny_moe: Path,
    tiny_moe_b: Path,
    tiny_adapters: dict[str, Path],
) -> None:
    adapter = next(iter(tiny_adapters.items()))

    async def answers(engine: Engine) -> list[Piece]:
        async with loaded(engine, dict([adapter])):
            models = (BASE_MODEL, adapter[0])
            return [await answer(engine, model=m, prompt=p) for m, p in itertools.product(models, PROMPTS)]

    async def check(engine: Engine) -> None:
        fresh_a = await answers(engine)
        async with engine_other.client() as other:
            fresh_b = await answers(other)
        assert fresh_a[0].token_ids != fresh_b[0].token_ids
        await engine.load_adapter(*adapter)
        for path, fresh in ((tiny_moe_b, fresh_b), (tiny_moe, fresh_a)):
            await engine.reload_weights(path)
            assert await engine.models() == {BASE_MODEL}, "adapters of the old base are gone"
            for piece, want in zip(await answers(engine), fresh, strict=True):
                assert_same(piece, want)

    run(engine_standard, check)


def test_weights_of_another_shape_are_refused(engine_standard: RunningEngine, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"model.embed_tokens.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")

    async def check(engine: Engine) -> None:
        before = await answer(engine)
        with pytest.raises(EngineRejected, match="tensors missing"):
            await engine.reload_weights(tmp_path)
        with pytest.raises(EngineRejected, match="no safetensors"):
            await engine.reload_weights(tmp_path / "nothing")
        assert_same(await answer(engine), before)

    run(engine_standard, check)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("ignored", "would be ignored"),
        ("truncated", "deserializing header"),
        ("missing", "doesn't contain tensors"),
        ("rank", "rank"),
    ],
)
def test_unusable_adapters_are_refused(
    engine_standard: RunningEngine, tmp_path: Path, damage: str, reason: str
) -> None:
    folder = tmp_path / "adapter"
    targets = {"q_proj": (HIDDEN, HIDDEN)} | ({"gate": (HIDDEN, 4)} if damage == "ignored" else {})
    write_adapter(folder, seed=9, targets=targets)
    weights = folder / "adapter_model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    if damage == "missing":
        weights.unlink()
    if damage == "rank":
        config = folder / "adapter_config.json"
        config.write_text(config.read_text().replace('"r": 8', '"r": 64'))

    async def check(engine: Engine) -> None:
        before = await answer(engine)
        with pytest.raises(EngineRejected, match=reason):
            await engine.load_adapter("bad", folder)
        assert await engine.models() == {BASE_MODEL}
        assert_same(await answer(engine), before)

    run(engine_standard, check)


def test_an_adapter_too_many_is_refused(
    engine_standard: RunningEngine, tiny_adapters: dict[str, Path]
) -> None:
    paths = itertools.cycle(tiny_adapters.values())

    async def check(engine: Engine) -> None:
        async with loaded(engine, {f"a{number}": next(paths) for number in range(6)}) as names:
            with pytest.raises(EngineRejected, match="unload one first"):
                await engine.load_adapter("a6", next(paths))
            await engine.unload_adapter(names[0])
            await engine.load_adapter("a6", next(paths))
            assert (await answer(engine, model="a6")).token_ids

    run(engine_standard, check)


CAPTURED = {
    "greedy": request(),
    "several": request(n=3, temperature=1, seed=5),
    "alternatives": request(top_logprobs=2),
    "stop": request(stop=["STOP"]),
    "tools": request(tools=[WEATHER], structured_outputs={"regex": TOOL_CALL}, max_tokens=64),
    "required": request(tools=[WEATHER], tool_choice="required", max_tokens=24),
    "one token": request(max_tokens=1),
}


@pytest.mark.parametrize("case", CAPTURED)
def test_capture_is_what_the_engine_sampled(engine_standard: RunningEngine, case: str) -> None:
    async def check(engine: Engine) -> None:
        body = CAPTURED[case]
        if case == "stop":
            text = (await engine.chat(request())).body["choices"][0]["message"]["content"]
            body = request(stop=[text[10:14]])
        whole = await engine.chat(body)
        prompt, pieces, texts, usage = await streamed(engine, body)
        assert prompt == whole.prompt_token_ids
        assert (
            sum(len(piece.token_ids) for piece in whole.choices) == whole.body["usage"]["completion_tokens"]
        )
        assert usage["completion_tokens"] == whole.body["usage"]["completion_tokens"]
        assert usage["prompt_tokens"] == len(prompt)
        assert len(whole.choices) == body.get("n", 1)
        for piece in whole.choices:
            assert_same(pieces[piece.index], piece)
            assert len(piece.logprobs) == len(piece.token_ids)
            if case != "required":  # Cut off by its length; vLLM streams the call and calls the whole text.
                assert said(whole, piece.index) == texts[piece.index]
            if "tools" not in body:  # A grammar renormalises; then the log-probs are not the policy's.
                scored = await engine.score(BASE_MODEL, prompt + piece.token_ids)
                assert piece.logprobs == pytest.approx(scored[len(prompt) :], abs=1e-4)
        if case == "tools":
            message = whole.body["choices"][0]["message"]
            assert message["tool_calls"][0]["function"]["name"] == "weather"
            assert not message["content"]
        if case == "alternatives":
            assert all(len(entry["top_logprobs"]) == 2 for entry in whole.choices[0].logprobs_content)

    run(engine_standard, check)


def said(result: ChatResult, index: int) -> str:
    message = result.body["choices"][index]["message"]
    calls = message.get("tool_calls") or []
    called = "".join(call["function"]["name"] + call["function"]["arguments"] for call in calls)
    return (message["content"] or "") + called


def test_a_prompt_given_as_ids_is_used_as_it_is(engine_standard: RunningEngine) -> None:
    async def check(engine: Engine) -> None:
        first = await engine.chat(request())
        ids = [*first.prompt_token_ids, *first.choices[0].token_ids, 111, 222]
        joined = await engine.chat(request("something else"), prompt_token_ids=ids)
        assert joined.prompt_token_ids == ids
        scored = await engine.score(BASE_MODEL, ids + joined.choices[0].token_ids)
        assert joined.choices[0].logprobs == pytest.approx(scored[len(ids) :], abs=1e-4)

    run(engine_standard, check)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"model": "nobody"}, 404),
        ({"messages": "hello"}, 400),
        ({"max_tokens": 5000}, 400),
        ({"prompt": "word " * 2000, "max_tokens": None}, 400),
    ],
)
def test_bad_requests_are_rejected_stream_and_not(
    engine_standard: RunningEngine, fields: dict[str, Any], status: int
) -> None:
    async def check(engine: Engine) -> None:
        body = request(**fields)
        with pytest.raises(EngineRejected) as whole:
            await engine.chat(body)
        with pytest.raises(EngineRejected) as stream:
            await streamed(engine, body)
        assert whole.value.status == stream.value.status == status
        assert whole.value.error["message"]

    run(engine_standard, check)


def test_closing_a_stream_ends_the_request(engine_standard: RunningEngine) -> None:
    async def check(engine: Engine) -> None:
        stream = engine.stream_chat(request(max_tokens=900, ignore_eos=True))
        async for event in stream:
            if event.pieces:
                break
        await stream.aclose()  # type: ignore[attr-defined]
        for _ in range(100):
            if (await engine.metrics())["vllm:num_requests_running"] == 0:
                return
            await asyncio.sleep(0.1)
        pytest.fail("the engine still computes an answer that nobody waits for")

    run(engine_standard, check)
