"""The official client against the server: if its types and exceptions are happy, most programs are."""

from __future__ import annotations

import asyncio

import openai
import pytest

from fake_engine import FakeEngine
from server_harness import MODEL, Running, Serve

HI: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Hi"}]


def test_completion(server: Running) -> None:
    reply = server.openai().completions.create(
        model=MODEL, prompt=["Hi", "Ho"], max_tokens=3, logprobs=1, seed=1
    )
    assert [choice.text for choice in reply.choices] == ["Hel", "Hel"]
    assert reply.choices[0].logprobs and reply.choices[0].logprobs.tokens == ["H", "e", "l"]
    assert reply.usage and reply.usage.total_tokens == 10
    assert reply.usage.prompt_tokens_details and reply.usage.prompt_tokens_details.cached_tokens == 0


def test_completion_stream(server: Running) -> None:
    stream = server.openai().completions.create(
        model=MODEL, prompt="Hi", stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "Hello, world"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == [] and chunks[-1].usage and chunks[-1].usage.completion_tokens == 13


def test_chat(server: Running) -> None:
    reply = server.openai().chat.completions.create(
        model=MODEL, messages=HI, max_completion_tokens=4, logprobs=True, top_logprobs=2, n=2
    )
    assert [choice.message.content for choice in reply.choices] == ["Hell", "Hell"]
    assert reply.choices[0].message.role == "assistant" and reply.choices[0].finish_reason == "length"
    content = reply.choices[0].logprobs and reply.choices[0].logprobs.content
    assert content and content[0].token == "H" and content[0].top_logprobs[1].token == "I"


def test_chat_stream_helper(server: Running) -> None:
    with server.openai().chat.completions.stream(model=MODEL, messages=HI) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "Hello, world"


def test_async_client(server: Running) -> None:
    async def work() -> list[str | None]:
        async with server.async_openai() as client:
            whole = [client.chat.completions.create(model=MODEL, messages=HI) for _ in range(8)]
            texts = [reply.choices[0].message.content for reply in await asyncio.gather(*whole)]
            stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
            return [*texts, "".join([chunk.choices[0].delta.content or "" async for chunk in stream])]

    assert asyncio.run(work()) == ["Hello, world"] * 9


def test_models(server: Running) -> None:
    client = server.openai()
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "octavo"


def test_extra_fields_of_vllm(server: Running) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "min_tokens": 1}
    reply = server.openai().chat.completions.create(model=MODEL, messages=HI, extra_body=extra)
    assert reply.choices[0].message.content == "Hello, world"


def test_exceptions(serve: Serve) -> None:
    server = serve(FakeEngine(fail_after=3), api_key="key")
    client = server.openai("key")
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nope", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=HI, temperature=-1)
    assert bad.value.param == "temperature" and bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="x" * 600)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        server.openai("wrong").models.list()
    with pytest.raises(openai.InternalServerError) as dead:
        client.chat.completions.create(model=MODEL, messages=HI)
    assert dead.value.status_code == 503
    stream = client.chat.completions.create(model=MODEL, messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="out of memory"):
        list(stream)


def test_leaving_a_stream_early_ends_the_request(serve: Serve) -> None:
    server = serve(FakeEngine(pause_after=3))
    with server.openai().completions.create(model=MODEL, prompt="Hi", stream=True) as stream:
        next(iter(stream))
    assert server.engine.idle.wait(20) and server.engine.num_closed_early == 1
