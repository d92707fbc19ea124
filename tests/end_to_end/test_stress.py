"""300 streams at once on a pool for about eight of them, a fifth of them cut off: all end, none wrong, all blocks back."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass

import httpx
import pytest

from engine_driver import make_engine, run
from octavo.sampling_params import SamplingParams
from octavo.server.logprobs import token_name
from octavo.text.tokenizer import Tokenizer
from octavo.weights.tokenizer_files import prepare_tokenizer

NUM_STREAMS = 300


@dataclass
class Ask:
    prompt: list[int]
    max_tokens: int
    cancel_after: int | None


def _asks() -> list[Ask]:
    rng = random.Random(99)
    shared = [rng.randrange(20, 40_000) for _ in range(40)]
    asks = []
    for i in range(NUM_STREAMS):
        prompt = shared[: rng.randrange(21)] + [
            rng.randrange(20, 40_000) for _ in range(rng.randrange(1, 20))
        ]
        max_tokens = rng.randrange(1, 90)
        asks.append(Ask(prompt, max_tokens, rng.randrange(max_tokens) if i % 5 == 0 else None))
    return asks


async def _stream(client: httpx.AsyncClient, ask: Ask) -> tuple[list[str], str | None]:
    """Texts of the tokens that came, and the finish reason (None if cut off)."""
    body = {
        "model": "tiny", "prompt": ask.prompt, "max_tokens": ask.max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "logprobs": 0,
    }  # fmt: skip
    tokens: list[str] = []
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        if ask.cancel_after == 0:
            return tokens, None
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            tokens.extend((choice["logprobs"] or {}).get("tokens", []))
            if ask.cancel_after is not None and len(tokens) >= ask.cancel_after:
                return tokens, None
            if choice["finish_reason"]:
                return tokens, choice["finish_reason"]
    raise AssertionError("the stream ended without a finish reason")


@pytest.mark.slow
def test_300_streams_on_a_pool_for_eight(tiny_server, tiny):
    asks = _asks()

    async def all_at_once() -> list[tuple[list[str], str | None]]:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(base_url=tiny_server.url, timeout=200, limits=limits) as client:
            return await asyncio.gather(*(_stream(client, ask) for ask in asks))

    results = asyncio.run(all_at_once())
    engine = make_engine(tiny, block_size=8, check=False)
    params = [SamplingParams(temperature=0, max_tokens=a.max_tokens, ignore_eos=True) for a in asks]
    expected = run(engine, [a.prompt for a in asks], params)
    tokenizer = Tokenizer(prepare_tokenizer(tiny))
    for ask, (tokens, reason), answer in zip(asks, results, expected, strict=True):
        right = [token_name(tokenizer, t) for t in answer.token_ids]
        if ask.cancel_after is None:
            assert (tokens, reason) == (right, "length")
        else:
            assert tokens == right[: len(tokens)]
    _wait_until_idle(tiny_server)
    assert tiny_server.metric("octavo_preemptions_total", '{kind="recompute"}') > 0
    assert tiny_server.metric("octavo_requests_finished_total", '{reason="abort"}') > 0
    assert tiny_server.metric("octavo_requests_finished_total", '{reason="error"}') == 0


def _wait_until_idle(server):
    """Poll the gauges: aborts are asynchronous, but must be through within moments."""
    for _ in range(400):
        busy = [server.metric(f"octavo_{n}") for n in ("requests_running", "requests_waiting", "blocks_used")]
        if not any(busy):
            return
    raise AssertionError(f"not idle: {busy}")
