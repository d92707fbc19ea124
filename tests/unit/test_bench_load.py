"""Closed and open loops, replies as they come over the wire, and being cut off. The servers here are stand-ins."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from octavo.bench.campaign import parse_target
from octavo.bench.client import CompletionsClient, RequestSettings, _Reading
from octavo.bench.load import Load, LoadResult, run_load
from octavo.bench.machine import command_line
from octavo.bench.memory import MemoryWatch, process_tree
from octavo.bench.outcome import Delivery, Outcome
from octavo.bench.workload import WorkloadRequest
from octavo.errors import BenchmarkError, ConfigError


def requests(count: int, **fields: Any) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(**{"request_id": str(i), "prompt": "Hi", "max_tokens": 2, **fields})
        for i in range(count)
    ]


class FakeClient:
    """Answers when `may_answer(client)` says so, which is asked again whenever a request comes or ends."""

    def __init__(self, may_answer: Callable[[FakeClient], bool] = lambda _: True) -> None:
        self._may_answer = may_answer
        self._news = asyncio.Condition()
        self.num_in_flight = 0
        self.most_in_flight = 0
        self.sent: list[str] = []

    async def send(
        self,
        request: WorkloadRequest,
        *,
        began: float,
        due_s: float | None = None,
        cache_salt: str | None = None,
    ) -> Outcome:
        self.sent.append(request.request_id)
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        async with self._news:
            self._news.notify_all()
            await self._news.wait_for(lambda: self._may_answer(self))
        self.num_in_flight -= 1
        return Outcome(request_id=request.request_id, due_s=due_s or 0.0, sent_s=due_s or 0.0)


def run(client: FakeClient, count: int, load: Load) -> LoadResult:
    return asyncio.run(run_load(client, requests(count), load))  # type: ignore[arg-type]


# --- loops


def test_closed_loop_keeps_to_its_concurrency_and_to_the_order() -> None:
    client = FakeClient(may_answer=lambda c: c.num_in_flight == 2 or len(c.sent) == 7)
    result = run(client, 7, Load(concurrency=2))
    assert client.most_in_flight == 2
    assert client.sent == [str(i) for i in range(7)]
    assert len(result.outcomes) == 7 and result.num_unfinished == 0 and not result.interrupted


def test_all_at_once_is_the_default() -> None:
    client = FakeClient(may_answer=lambda c: len(c.sent) == 5)
    assert len(run(client, 5, Load()).outcomes) == 5
    assert client.most_in_flight == 5


def test_slow_server_does_not_slow_the_arrivals_of_an_open_loop() -> None:
    # It answers nothing before the last request has come: a client that waited for answers would wait for ever.
    client = FakeClient(may_answer=lambda c: len(c.sent) == 20)
    result = run(client, 20, Load(rate=10_000.0, seed=1))
    assert len(result.outcomes) == 20
    due = [outcome.due_s for outcome in sorted(result.outcomes, key=lambda o: int(o.request_id))]
    assert due == sorted(due) and due[0] > 0


def test_being_cut_off_keeps_what_had_ended() -> None:
    async def cut_off() -> LoadResult:
        client = FakeClient(may_answer=lambda c: len(c.sent) < 4)
        work = asyncio.ensure_future(run_load(client, requests(9), Load(concurrency=1)))  # type: ignore[arg-type]
        async with client._news:
            await client._news.wait_for(lambda: len(client.sent) == 4)
        work.cancel()
        return await work

    result = asyncio.run(cut_off())
    assert result.interrupted
    assert (len(result.outcomes), result.num_unfinished) == (3, 6)


def test_loads_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="--concurrency and --rate exclude each other"):
        Load(concurrency=1, rate=1.0)
    with pytest.raises(ConfigError, match="--concurrency is 0"):
        Load(concurrency=0)


# --- what is sent


def test_body_has_the_request_and_what_every_request_gets() -> None:
    [request] = requests(1, prompt_token_ids=(1, 2), n=3, extra_body={"top_k": 4, "seed": 1})
    client = CompletionsClient("http://x", RequestSettings(model="m", extra_body={"seed": 7}))
    assert client.body(request, "salt") == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 2,
        "temperature": 0.0,
        "ignore_eos": True,
        "n": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": "salt",
        "top_k": 4,
        "seed": 7,
    }
    plain = CompletionsClient(
        "http://x", RequestSettings(model="m", send_text=True, stream=False, ignore_eos=False)
    )
    assert plain.body(requests(1)[0]) == {"model": "m", "prompt": "Hi", "max_tokens": 2, "temperature": 0.0}


# --- what comes back


def read(*events: Any, sequences: int = 1, ticks: list[float] | None = None) -> Outcome:
    """The outcome of a stream with these events; bytes stand for lines as they are."""

    async def lines() -> AsyncIterator[bytes]:
        for event in events:
            yield event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n"
            yield b"\n"

    times = iter(ticks or range(1, 100))
    outcome = Outcome(request_id="r", due_s=0.0, sent_s=0.0, num_sequences=sequences)
    asyncio.run(_Reading(outcome, lambda: float(next(times))).stream(lines()))
    return outcome


def piece(text: str, finish_reason: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": text, "finish_reason": finish_reason}], **more}


def usage(prompt: int, completion: int, **more: Any) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, **more}


def test_stream_gives_deliveries_and_usage() -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 2}}
    outcome = read(
        piece("a", usage=None),
        piece("", "length", usage=None),
        {"choices": [], "usage": usage(3, 2, **details)},
        b"data: [DONE]\n",
    )
    assert outcome.deliveries == {0: [Delivery(1.0), Delivery(2.0, None, True)]}
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens, outcome.num_cached_tokens) == (3, 2, 2)


def test_usage_that_grows_tells_the_tokens_of_each_piece() -> None:
    outcome = read(piece("a", usage=usage(3, 1)), piece("bc", "length", usage=usage(3, 3)), b"data: [DONE]\n")
    assert [delivery.num_tokens for delivery in outcome.deliveries[0]] == [1, 2]


def test_usage_beside_a_sequence_is_of_that_sequence_alone() -> None:
    outcome = read(
        piece("a", index=0),
        piece("b", index=1),
        piece("", "length", index=0, usage=usage(3, 1)),
        piece("", "length", index=1, usage=usage(3, 2)),
        b"data: [DONE]\n",
        sequences=2,
    )
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens) == (3, 3)


def test_text_is_the_same_however_it_was_cut() -> None:
    done = b"data: [DONE]\n"
    whole = read(piece("ab", index=1), piece("c", index=0), done, sequences=2)
    cut = read(piece("c", index=0), piece("a", index=1), piece("b", index=1), done, sequences=2)
    other = read(piece("cab", index=0), piece("", index=1), done, sequences=2)
    assert whole.text_digest == cut.text_digest != other.text_digest


@pytest.mark.parametrize(
    ("events", "fault"),
    [
        ([piece("a")], r"the stream ended without \[DONE\]"),
        ([piece("a"), {"error": {"message": "out of memory"}}], "out of memory"),
        ([b'error: {"message": "bad slot"}\n'], "bad slot"),
        ([b"data: [DONE]\n"], "1 sequences were asked for, 0 came"),
    ],
)
def test_stream_that_failed_is_a_failure(events: list[Any], fault: str) -> None:
    with pytest.raises(BenchmarkError, match=fault):
        read(*events)


# --- small things


def test_targets_are_addresses_with_or_without_a_name() -> None:
    bare = parse_target("http://127.0.0.1:8000/v1/")
    assert (bare.label, bare.url) == ("127.0.0.1:8000", "http://127.0.0.1:8000")
    named = parse_target("ours=https://host/base", server_pid=5)
    assert (named.label, named.url, named.server_pid) == ("ours", "https://host/base", 5)
    with pytest.raises(ConfigError, match="'localhost:8000' is no address"):
        parse_target("localhost:8000")


def test_recorded_command_has_no_secret() -> None:
    for given in (["--api-key", "secret"], ["--api-key=secret"]):
        assert "secret" not in command_line(["/x/octavo", "bench", *given, "--rate", "1"])


def test_memory_of_a_process_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="--server-pid is 999999999"):
        MemoryWatch(999_999_999)


def test_memory_of_a_tree_is_watched() -> None:
    async def watch() -> MemoryWatch:
        async with MemoryWatch(os.getpid()) as watch:
            return watch

    use = asyncio.run(watch()).use
    assert os.getpid() in process_tree(os.getpid())
    assert 1_000_000 < use.peak_pss_bytes <= use.peak_rss_bytes
