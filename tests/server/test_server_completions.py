"""POST /v1/completions: shapes, order, echo, log probabilities, usage."""

from __future__ import annotations

from typing import Any

import pytest

from fake_engine import SPECIAL, FakeEngine
from server_harness import Running, Serve, chunks

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def joined(parts: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """A streamed choice put together."""
    choices = [choice for part in parts for choice in part["choices"] if choice["index"] == index]
    logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    return {
        "index": index,
        "text": "".join(choice["text"] for choice in choices),
        "logprobs": {name: [v for piece in logprobs for v in piece[name]] for name in LISTS}
        if logprobs
        else None,
        "finish_reason": choices[-1]["finish_reason"],
        "stop_reason": choices[-1]["stop_reason"],
    }


def test_reply_has_the_standard_shape(server: Running) -> None:
    reply = server.complete(max_tokens=5).json()
    assert reply["object"] == "text_completion" and reply["id"].startswith("cmpl-")
    assert reply["model"] == "org/fake-model" and type(reply["created"]) is int
    assert reply["choices"] == [
        {"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert reply["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_default_limit_is_16_tokens(serve: Serve) -> None:
    server = serve(FakeEngine(says="x" * 40))
    for limit in ({}, {"max_tokens": None}):
        assert server.complete(**limit).json()["choices"][0]["text"] == "x" * 16


def test_choices_are_grouped_by_prompt(serve: Serve) -> None:
    server = serve(FakeEngine(says="<{index}>", cached=1))
    reply = server.complete(prompt=["one", "three"], n=2, echo=True).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in reply["choices"]] == ["one<0>", "one<1>", "three<0>", "three<1>"]
    assert reply["usage"]["prompt_tokens"] == 8, "each prompt is counted once"
    assert reply["usage"]["completion_tokens"] == 16
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_token_lists_equal_their_text(server: Running) -> None:
    texts = ["Hi", "Hé 🎉"]
    by_text = server.complete(prompt=texts, echo=True).json()["choices"]
    by_ids = server.complete(prompt=[list(text.encode()) for text in texts], echo=True).json()["choices"]
    assert by_ids == by_text
    assert server.complete(prompt=list(b"Hi"), echo=True).json()["choices"] == by_text[:1]


def test_many_prompts_in_one_call(server: Running) -> None:
    reply = server.complete(prompt=[f"Item {i}:" for i in range(300)], max_tokens=2, echo=True).json()
    assert [choice["text"] for choice in reply["choices"]] == [f"Item {i}:He" for i in range(300)]


def test_logprobs_have_one_entry_per_token(server: Running) -> None:
    logprobs = server.complete(max_tokens=3, logprobs=2).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["H", "e", "l"]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["text_offset"] == [0, 1, 2]
    assert [list(top) for top in logprobs["top_logprobs"]] == [["H", "I"], ["e", "f"], ["l", "m"]]


def test_logprobs_zero_reports_the_chosen_token_only(server: Running) -> None:
    logprobs = server.complete(max_tokens=2, logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"H": -0.5}, {"e": -0.5}]


def test_chosen_token_is_listed_beside_the_likeliest(server: Running) -> None:
    logprobs = server.complete(max_tokens=1, logprobs=3).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"H": -0.5, "I": -1.0, "J": -2.0}]


def test_infinite_logprobs_stay_out_of_json(server: Running) -> None:
    reply = server.complete(max_tokens=2, logprobs=20)
    assert "Infinity" not in reply.text and "NaN" not in reply.text
    values = [v for top in reply.json()["choices"][0]["logprobs"]["top_logprobs"] for v in top.values()]
    assert all(type(v) is float and v >= -9999.0 for v in values)


def test_echo_scores_the_prompt_and_the_first_entry_is_null(server: Running) -> None:
    choice = server.complete(prompt="Hey", echo=True, logprobs=1, max_tokens=2).json()["choices"][0]
    assert choice["text"] == "HeyHe"
    assert choice["logprobs"]["tokens"] == ["H", "e", "y", "H", "e"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]


def test_scoring_only(server: Running) -> None:
    for stream in (False, True):
        response = server.complete(prompt="Yes", echo=True, logprobs=1, max_tokens=0, stream=stream)
        choice = joined(chunks(response.text)) if stream else response.json()["choices"][0]
        assert choice["text"] == "Yes" and choice["finish_reason"] == "length"
        assert choice["logprobs"]["tokens"] == ["Y", "e", "s"]
        if not stream:
            assert response.json()["usage"]["completion_tokens"] == 0


def test_no_tokens_without_echo_is_an_empty_text(server: Running) -> None:
    reply = server.complete(max_tokens=0, logprobs=1).json()
    assert reply["choices"][0]["text"] == "" and reply["usage"]["completion_tokens"] == 0
    assert reply["choices"][0]["logprobs"] == {name: [] for name in LISTS}


def test_echo_of_special_tokens(server: Running) -> None:
    ids = [SPECIAL["<|user|>"], *b"Hi"]
    hidden = server.complete(prompt=ids, echo=True, max_tokens=0).json()["choices"][0]
    shown = server.complete(
        prompt=ids, echo=True, max_tokens=0, skip_special_tokens=False, logprobs=0
    ).json()["choices"][0]
    assert hidden["text"] == "Hi"
    assert shown["text"] == "<|user|>Hi" and shown["logprobs"]["text_offset"] == [0, 8, 9]


def test_parts_of_a_character_share_its_offset(serve: Serve) -> None:
    server = serve(FakeEngine(says="é🎉x"))
    logprobs = server.complete(prompt="ü", echo=True, logprobs=0).json()["choices"][0]["logprobs"]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 2, 2, 2, 3, 4]
    assert logprobs["tokens"][2:4] == ["bytes:\\xc3", "bytes:\\xa9"]


@pytest.mark.parametrize(
    "fields", [{}, {"n": 3}, {"echo": True}, {"echo": True, "logprobs": 2, "n": 2}, {"logprobs": 0}]
)
@pytest.mark.parametrize("prompt", ["Hi é", ["a", "bc", "def"]])
def test_stream_equals_whole_reply(serve: Serve, fields: dict[str, Any], prompt: Any) -> None:
    server = serve(FakeEngine(says="{index} naïve 👩\u200d🚀\u2028\n\r\x85 end ", cached=1))
    body = {"prompt": prompt, "max_tokens": 64, **fields}
    whole = server.complete(**body).json()
    parts = chunks(server.complete(**body, stream=True, stream_options={"include_usage": True}).text)
    assert [joined(parts, i) for i in range(len(whole["choices"]))] == whole["choices"]
    assert parts[-1]["choices"] == [] and parts[-1]["usage"] == whole["usage"]
    assert all(part["usage"] is None and part["choices"] for part in parts[:-1])
    assert all("\ufffd" not in choice["text"] for part in parts for choice in part["choices"])


def test_no_usage_in_a_stream_unless_asked_for(server: Running) -> None:
    for options in (
        {},
        {"stream_options": {}},
        {"stream_options": {"include_usage": False}},
        {"stream_options": None},
    ):
        parts = chunks(server.complete(stream=True, **options).text)
        assert all("usage" not in part and part["choices"] for part in parts)


def test_no_empty_chunks(serve: Serve) -> None:
    server = serve(FakeEngine(says="🎉"))
    texts = [part["choices"][0]["text"] for part in chunks(server.complete(stream=True).text)]
    assert texts == ["🎉", ""], "one for the character, one for the finish reason"


def test_prompt_is_cut_from_the_left(server: Running) -> None:
    reply = server.complete(prompt="abcdefgh", truncate_prompt_tokens=4, echo=True, max_tokens=1).json()
    assert reply["choices"][0]["text"] == "efghH" and reply["usage"]["prompt_tokens"] == 4
    for keep in (100, -1, None):
        reply = server.complete(prompt="abc", truncate_prompt_tokens=keep, echo=True, max_tokens=1).json()
        assert reply["choices"][0]["text"] == "abcH" and reply["usage"]["prompt_tokens"] == 3
    assert (
        server.complete(prompt="x" * 2000, truncate_prompt_tokens=50).json()["usage"]["prompt_tokens"] == 50
    )


def test_prompt_logprobs_come_in_the_choice(server: Running) -> None:
    choice = server.complete(prompt="ab", prompt_logprobs=1, max_tokens=1).json()["choices"][0]
    assert choice["prompt_logprobs"] == [
        None,
        {"98": {"logprob": -0.5, "decoded_token": "b"}},
    ]


def test_parameters_reach_the_engine(serve: Serve) -> None:
    server = serve()
    sent = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "seed": -3,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.1,
        "stop_token_ids": [3],
        "allowed_token_ids": [1, 2],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "min_tokens": 1,
        "max_tokens": 2,
    }
    response = server.complete(
        **sent, stop="x", logit_bias={"5": -2, "6": 1.5}, priority=-4, cache_salt="tenant"
    )
    assert response.status_code == 200
    (request,) = server.engine.requests
    got = request.params
    assert {name: list(v) if isinstance(v := getattr(got, name), tuple) else v for name in sent} == sent
    assert got.stop == ("x",) and got.logit_bias == {5: -2, 6: 1.5}
    assert request.priority == -4 and request.cache_salt == "tenant"
    assert request.request_id == response.json()["id"] + "-0"


@pytest.mark.parametrize(("stop", "seen"), [(None, ()), ([], ()), ("a", ("a",)), (["a", "b"], ("a", "b"))])
def test_forms_of_stop(serve: Serve, stop: Any, seen: tuple[str, ...]) -> None:
    server = serve()
    assert server.complete(stop=stop).status_code == 200
    assert server.engine.requests[0].params.stop == seen
