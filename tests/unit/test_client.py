"""The async face of an engine process, with a link that a test plays the engine on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from octavo.engine import client as client_module
from octavo.engine.client import EngineClient
from octavo.engine.messages import EngineStats, FromEngine, GenerateRequest, SequenceUpdate, StepReport
from octavo.errors import EngineDeadError
from octavo.outputs import EngineFacts
from octavo.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer
from octavo.weights.tokenizer_files import prepare_tokenizer
from served_model import real_model

FACTS = EngineFacts(
    model="m", architecture="fake", dtype="float32", attention_backend="none", cpu_features=(), num_threads=1,
    weight_bytes=0, block_size=16, num_blocks=64, block_bytes=1, num_host_blocks=0, max_model_len=512,
    vocab_size=49152, eos_token_ids=(2,), prefix_caching=True, preemption="recompute", policy="fcfs",
    max_num_seqs=8, max_num_batched_tokens=64, load_s=0.0,
)  # fmt: skip


class PlayedLink:
    """What is put into `says` is what the engine says; it never ends."""

    pid = 0

    def __init__(self) -> None:
        self.says: asyncio.Queue[FromEngine] = asyncio.Queue()
        self.heard: list[Any] = []

    def send(self, message: Any) -> None:
        self.heard.append(message)

    async def receive(self) -> FromEngine:
        return await self.says.get()

    async def ended(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def close(self) -> None:
        pass


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(client_module, "time", clock)
    return clock


def update(*tokens: int, index: int = 0, finish: str | None = None) -> StepReport:
    return StepReport((SequenceUpdate("r", index, tokens, finish_reason=finish),), EngineStats())


def test_an_engine_that_has_done_its_work_is_well_however_slowly_a_client_reads(clock):
    async def play() -> None:
        link = PlayedLink()
        tokenizer = Tokenizer(prepare_tokenizer(real_model()))
        client = EngineClient(link, FACTS, tokenizer, stall_timeout_s=10)  # type: ignore[arg-type]
        deltas = client.generate(GenerateRequest("r", (5,), SamplingParams(n=2, max_tokens=2)))
        for report in (update(28, index=0), update(28, index=1, finish="length")):
            link.says.put_nowait(report)
        assert (await anext(deltas)).index == 0
        clock.now = 9.0
        assert client.health() is None
        clock.now = 11.0
        assert "11 s" in str(client.health()), "the first sequence is still to come"
        link.says.put_nowait(update(28, index=0, finish="length"))
        assert (await anext(deltas)).index == 1
        while not link.says.empty():  # what is said now is heard, but its delta stays unread
            await asyncio.sleep(0)
        clock.now = 100.0
        assert client.health() is None
        await deltas.aclose()
        await client.stop()

    asyncio.run(play())


def test_a_message_that_cannot_be_read_fails_the_requests_rather_than_leaving_them_waiting():
    class Garbled(PlayedLink):
        async def receive(self) -> FromEngine:
            await super().receive()
            raise ValueError("not a message")

    async def play() -> None:
        link = Garbled()
        client = EngineClient(link, FACTS, Tokenizer(prepare_tokenizer(real_model())), stall_timeout_s=10)  # type: ignore[arg-type]
        deltas = client.generate(GenerateRequest("r", (5,), SamplingParams(max_tokens=2)))
        link.says.put_nowait(update(28))
        with pytest.raises(EngineDeadError, match="not a message"):
            await anext(deltas)
        assert "not a message" in str(client.health())
        await client.stop()

    asyncio.run(play())
