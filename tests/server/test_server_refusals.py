"""What is not served: every wrong request is a 4xx in the standard shape that names the field at fault."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_engine import FakeEngine
from octavo.errors import OctavoError
from octavo.server.body import parse_body
from octavo.server.fields import IGNORED_HEADER, UNSUPPORTED, WITHOUT_EFFECT
from octavo.server.params import chat_params, completion_params
from octavo.server.prompts import split_prompts
from octavo.server.schemas import ChatBody, CompletionBody
from server_harness import MODEL, Running, Serve, refused

BAD = [
    ("max_tokens", "5"),
    ("max_tokens", 5.5),
    ("max_tokens", 5.0),
    ("max_tokens", True),
    ("max_tokens", 10**30),
    ("max_tokens", [5]),
    ("max_tokens", {}),
    ("max_tokens", -1),
    ("min_tokens", -1),
    ("n", 0),
    ("n", 129),
    ("n", "1"),
    ("temperature", -0.1),
    ("temperature", "0.5"),
    ("temperature", True),
    ("temperature", []),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 1.0),
    ("min_p", 2),
    ("seed", 2**63),
    ("seed", 1.5),
    ("presence_penalty", 3),
    ("frequency_penalty", -3),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-40),
    ("stop", ""),
    ("stop", [""]),
    ("stop", 5),
    ("stop", [5]),
    ("stop", {}),
    ("stop", ["x"] * 17),
    ("stop", "x" * 1025),
    ("stop_token_ids", [2**70]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", 5),
    ("allowed_token_ids", []),
    ("logit_bias", {"abc": 1}),
    ("logit_bias", {"1.5": 1}),
    ("logit_bias", {"": 1}),
    ("logit_bias", {"٣": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {"5": "x"}),
    ("logit_bias", {"5": True}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"5": 10**400}),
    ("logit_bias", [1, 2]),
    ("logit_bias", {str(i): 1 for i in range(1025)}),
    ("prompt_logprobs", 21),
    ("prompt_logprobs", -1),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -5),
    ("truncate_prompt_tokens", 513),
    ("stream", "yes"),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("priority", "high"),
    ("priority", 2**64),
    ("cache_salt", 5),
    ("model", None),
    ("model", 5),
    ("ignore_eos", 1),
    ("skip_special_tokens", "no"),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda v: repr(v)[:30])
def test_wrong_values_are_refused_by_both_endpoints(server: Running, name: str, value: Any) -> None:
    for response in (server.complete(**{name: value}), server.chat(**{name: value})):
        refused(response, name + (f"[{0}]" if name == "stop_token_ids" and value in ([2**70], ["a"]) else ""))


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_values_of_one_endpoint(server: Running, stream: bool) -> None:
    for value in (-1, 21, 10**6, 10**19, True, "1"):
        refused(server.complete(logprobs=value, stream=stream), "logprobs")
    for value in (-1, 21, 10**6):
        refused(server.chat(logprobs=True, top_logprobs=value, stream=stream), "top_logprobs")
    for flag in ({}, {"logprobs": False}, {"logprobs": None}):
        refused(server.chat(top_logprobs=5, stream=stream, **flag), "top_logprobs")
    refused(server.chat(logprobs=5, stream=stream), "logprobs")
    refused(server.chat(max_tokens=3, max_completion_tokens=4, stream=stream), "max_completion_tokens")
    refused(server.complete(min_tokens=10, max_tokens=5, stream=stream), "min_tokens")
    refused(server.complete(prompt_logprobs=1, stream=True), "prompt_logprobs")
    refused(server.complete(echo=True, logprobs=1, prompt_logprobs=-3), "prompt_logprobs")
    refused(
        server.complete(stream=True, stream_options={"foo": 1}), "stream_options.foo", code="unknown_field"
    )


BAD_PROMPTS = [
    *("", [""], ["Hello", ""], [], [[]], [[1], []], "\x04", "\x04\x04", None, 5, {}, True, [True], [1, True]),
    *([1, "a"], ["a", 1], [[1], "a"], [[1], [2.5]], [1.0], [[[1]]], [None], ["a", None]),
    *([-1], [259], [2**31], [10**30]),
]


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=repr)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_prompts_are_refused_before_the_first_byte(server: Running, prompt: Any, stream: bool) -> None:
    refused(server.complete(prompt=prompt, stream=stream), "prompt")


def test_one_bad_prompt_refuses_the_whole_call(serve: Serve) -> None:
    server = serve()
    for bad in ("x" * 600, "\x04"):
        refused(server.complete(prompt=["short", bad, "also short"]))
    refused(server.complete(prompt=["short", "x" * 600]), code="context_length_exceeded")
    assert server.engine.requests == [], "nothing has been started"
    assert len(server.complete(prompt=["short", "also short"]).json()["choices"]) == 2


def test_too_many_prompts_or_choices(server: Running) -> None:
    refused(server.complete(prompt=["a"] * 2049), "prompt")
    refused(server.complete(prompt=["a"] * 2048, n=3), "n")


def test_required_fields(server: Running) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        refused(server.post(path, {}), "model", code="missing_field")
    refused(server.post("/v1/completions", {"model": MODEL}), "prompt", code="missing_field")
    refused(server.post("/v1/chat/completions", {"model": MODEL}), "messages", code="missing_field")


def test_unknown_model_is_404(server: Running) -> None:
    refused(server.complete(model="nope"), "model", 404, "model_not_found")
    refused(server.chat(model="", stream=True), "model", 404)


def test_unknown_fields_are_named(server: Running) -> None:
    refused(server.complete(temprature=1), "temprature", code="unknown_field")
    refused(server.chat(prompt="x"), "prompt", code="unknown_field")
    refused(server.complete(**{"é" * 5000: 1}), code="unknown_field")


DEEP = "[" * 100_000 + "]" * 100_000
BROKEN = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"{} x",
    b"\xff\xfe",
    b'{"model": "\xed\xa0\x80"}',
    b'{"model": "\\ud800"}',
    b'{"model": NaN}',
    b'{"max_tokens": 1' + b"0" * 5000 + b"}",
    f'{{"model": "{MODEL}", "prompt": "Hi", "x": {DEEP}}}'.encode(),
    f'{{"model": "{MODEL}", "prompt": {DEEP}}}'.encode(),
    f'{{"model": "{MODEL}", "messages": [{{"role": "user", "content": {DEEP}}}]}}'.encode(),
    b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
]


@pytest.mark.parametrize("raw", BROKEN, ids=lambda raw: repr(raw[:30]))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_broken_json_is_a_client_error(server: Running, path: str, raw: bytes) -> None:
    refused(server.post(path, raw))


def test_huge_numbers_do_not_overflow(server: Running) -> None:
    for text in ("1e999", "-1e999", "1" + "0" * 400):
        raw = f'{{"model": "{MODEL}", "prompt": "Hi", "temperature": {text}}}'.encode()
        refused(server.post("/v1/completions", raw), "temperature")


def test_body_above_the_limit_is_413(serve: Serve) -> None:
    server = serve(max_body_bytes=1000)
    body = json.dumps({"model": MODEL, "prompt": "x" * 2000}).encode()
    refused(server.post("/v1/completions", body), status=413, code="body_too_large")
    pieces = iter([body[:500], body[500:]])  # no content-length
    refused(server.http.post("/v1/completions", content=pieces), status=413, code="body_too_large")
    assert server.complete().status_code == 200


def test_paths_and_methods_that_are_not_there(server: Running) -> None:
    refused(server.http.get("/v1/nothing"), status=404)
    refused(server.http.delete("/v1/completions"), status=405)
    assert server.http.delete("/v1/completions").headers["allow"] == "POST"
    refused(server.http.options("/v1/completions", headers={"origin": "http://x"}), status=405)


WANTS_SOMETHING: dict[str, list[Any]] = {
    "response_format": [{"type": "json_object"}, {"type": "text", "x": 1}, "text", {}],
    "use_beam_search": [True, 1],
    "best_of": [2, 1.0, "1", True],
    "bad_words": [["x"], "x"],
    "guided_json": [{}, []],
    "structured_outputs": [{"choice": ["a"]}],
    "length_penalty": [2, 0.5],
    "beam_width": [4, True],
    "return_token_ids": [True],
}


@pytest.mark.parametrize("kind", ["completion", "chat"])
def test_known_fields_that_are_not_offered(server: Running, kind: str) -> None:
    ask = server.complete if kind == "completion" else server.chat
    for name, neutral in UNSUPPORTED[kind].items():
        for value in (None, *neutral):
            assert ask(**{name: value}).status_code == 200, (name, value)
        refused(ask(**{name: "something"}), name, code="unsupported")
    for name, values in WANTS_SOMETHING.items():
        for value in values:
            refused(ask(**{name: value}), name, code="unsupported")
    assert ask(n=3, best_of=3).status_code == 200
    assert ask(best_of=1, length_penalty=1.0).status_code == 200


def test_tools(server: Running) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    refused(server.chat(tools=tools), "tools", code="unsupported")
    refused(server.chat(tools=tools, tool_choice="auto"), "tools", code="unsupported")
    for choice in ("required", {"type": "function", "function": {"name": "f"}}, {}, "nonsense", 5):
        refused(server.chat(tools=tools, tool_choice=choice), "tool_choice", code="unsupported")
        refused(server.chat(tool_choice=choice), "tool_choice", code="unsupported")
    refused(server.chat(tools={}), "tools")
    refused(server.chat(functions=[{"name": "f"}]), "functions", code="unsupported")
    for neutral in ({"tools": []}, {"tools": None, "tool_choice": "none"}, {"tool_choice": "auto"}):
        response = server.chat(**neutral)
        assert response.status_code == 200 and IGNORED_HEADER not in response.headers
    response = server.chat(tools=tools, tool_choice="none")
    assert response.status_code == 200 and response.headers[IGNORED_HEADER] == "tools"


def test_fields_without_effect_are_listed(server: Running) -> None:
    values = {str: "x", dict: {}, bool: False}
    sent = {name: values[kind] for name, kind in WITHOUT_EFFECT.items()}
    for ask in (server.complete, server.chat):
        for stream in (False, True):
            response = ask(**sent, stream=stream)
            assert response.status_code == 200
            assert response.headers[IGNORED_HEADER].split(", ") == list(sent)
        assert IGNORED_HEADER not in ask(**dict.fromkeys(sent)).headers
    refused(server.complete(store=True), "store", code="unsupported")
    refused(server.complete(user=5), "user")


def test_priority_is_listed_unless_the_policy_heeds_it(serve: Serve) -> None:
    plain = FakeEngine()
    assert serve(plain).complete(priority=5).headers[IGNORED_HEADER] == "priority"
    engine = FakeEngine()
    engine.facts = type(engine.facts)(**{**engine.facts.__dict__, "policy": "priority"})
    assert IGNORED_HEADER not in serve(engine).complete(priority=5).headers


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = sorted(
    {
        *CompletionBody.model_fields,
        *ChatBody.model_fields,
        *WITHOUT_EFFECT,
        *UNSUPPORTED["chat"],
        "tools",
        "best_of",
    }
)


@settings(max_examples=150, deadline=None)
@given(fields=st.dictionaries(st.sampled_from(NAMES), ANY, max_size=4), chat=st.booleans())
def test_no_body_is_a_fault_of_ours(fields: dict[str, Any], chat: bool) -> None:
    base: dict[str, Any] = {"model": MODEL, "messages": [{}]} if chat else {"model": MODEL, "prompt": "Hi"}
    raw = json.dumps({**base, **fields}).encode()
    try:
        if chat:
            chat_params(parse_body(raw, ChatBody, "chat")[0])
        else:
            body = parse_body(raw, CompletionBody, "completion")[0]
            completion_params(body)
            split_prompts(body.prompt)
    except OctavoError as e:
        assert e.message
