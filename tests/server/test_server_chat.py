"""POST /v1/chat/completions: shapes, streaming, log probabilities, limits."""

from __future__ import annotations

from typing import Any

import pytest

from fake_engine import FakeEngine
from server_harness import Running, Serve, chunks


def test_reply_has_the_standard_shape(server: Running) -> None:
    reply = server.chat().json()
    assert reply["object"] == "chat.completion" and reply["id"].startswith("chatcmpl-")
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello, world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert reply["usage"]["prompt_tokens"] == 11 and reply["usage"]["completion_tokens"] == 13


def test_without_a_limit_it_runs_on(serve: Serve) -> None:
    server = serve(FakeEngine(says="x" * 1000))
    usage = server.chat().json()["usage"]
    assert usage["total_tokens"] == 512


@pytest.mark.parametrize(
    "limits", [{"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 3}]
)
def test_both_names_of_the_limit(server: Running, limits: dict[str, int]) -> None:
    assert server.chat(**limits).json()["choices"][0]["message"]["content"] == "Hel"


def test_stream_begins_with_the_role_and_ends_with_the_reason(server: Running) -> None:
    parts = chunks(server.chat(stream=True).text)
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    assert len({(part["id"], part["created"]) for part in parts}) == 1
    choices = [part["choices"][0] for part in parts]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert "".join(choice["delta"].get("content", "") for choice in choices) == "Hello, world"


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"logprobs": True, "top_logprobs": 2, "n": 2}])
def test_stream_equals_whole_reply(serve: Serve, fields: dict[str, Any]) -> None:
    server = serve(FakeEngine(says="{index} naïve 👩\u200d🚀\u2028\n\x85 end "))
    whole = server.chat(**fields).json()
    parts = chunks(server.chat(**fields, stream=True, stream_options={"include_usage": True}).text)
    assert parts[-1]["choices"] == [] and parts[-1]["usage"] == whole["usage"]
    assert all(part["usage"] is None for part in parts[:-1])
    for expected in whole["choices"]:
        choices = [c for part in parts for c in part["choices"] if c["index"] == expected["index"]]
        assert "".join(c["delta"].get("content", "") for c in choices) == expected["message"]["content"]
        assert choices[-1]["finish_reason"] == expected["finish_reason"]
        if expected["logprobs"]:
            content = [item for c in choices if c["logprobs"] for item in c["logprobs"]["content"]]
            assert content == expected["logprobs"]["content"]


def test_logprobs(server: Running) -> None:
    def token(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = server.chat(logprobs=True, top_logprobs=2, max_tokens=1).json()["choices"][0]["logprobs"][
        "content"
    ]
    assert content == [{**token("H", -0.5), "top_logprobs": [token("H", -0.5), token("I", -1.0)]}]
    content = server.chat(logprobs=True, max_tokens=1).json()["choices"][0]["logprobs"]["content"]
    assert content == [{**token("H", -0.5), "top_logprobs": []}]


def test_bytes_of_a_split_character_are_exact(serve: Serve) -> None:
    server = serve(FakeEngine(says="🎉"))
    content = server.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert bytes(b for item in content[:4] for b in item["bytes"]) == "🎉".encode()


def test_template_options(serve: Serve) -> None:
    server = serve()
    for sent, generation, proceed in (
        ({}, True, False),
        ({"continue_final_message": True}, False, True),
        ({"add_generation_prompt": False}, False, False),
    ):
        assert server.chat(**sent).status_code == 200
        assert server.engine.chat_options == {
            "add_generation_prompt": generation,
            "continue_final_message": proceed,
            "tools": None,
        }
    assert server.chat(continue_final_message=True, add_generation_prompt=True).status_code == 400


def test_prompt_logprobs_come_beside_the_choices(server: Running) -> None:
    scores = server.chat(prompt_logprobs=0, max_tokens=1).json()["prompt_logprobs"]
    assert scores[0] is None and len(scores) == 11
    assert scores[-1] == {"258": {"logprob": -0.5, "decoded_token": "<|assistant|>"}}


@pytest.mark.parametrize(
    "messages", [[], "text", [123], None, {}, [{}], [{"role": 1}], [{"role": "user", "content": 5}], [[]]]
)
def test_malformed_messages_are_refused(server: Running, messages: Any) -> None:
    response = server.chat(messages=messages)
    assert response.status_code == 400 and response.json()["error"]["param"].startswith("messages")
