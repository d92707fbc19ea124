"""The same workload through the offline API, in this process: no HTTP, no other process, no client beside the engine.

The model is known only by what is called on it (`OfflineModel`), so that this package needs no engine. Steps are timed by
standing between the model and its engine: `TimedEngine` passes everything on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.bench.summary import Spread, spread
from octavo.bench.workload import WorkloadRequest
from octavo.errors import ConfigError
from octavo.sampling_params import SamplingParams


class OfflineModel(Protocol):
    """What is used of `octavo.LLM`. `engine` is replaced while a run lasts."""

    engine: Any

    def generate(self, prompts: Any, params: Any, *, progress: bool = False) -> Any: ...


class TimedEngine:
    """An engine whose steps are timed. `step` writes `step_s`, and counts the tokens and the ends that it reports."""

    def __init__(self, engine: Any) -> None:
        self.inner = engine
        self.step_s: list[float] = []
        self.num_tokens = 0
        self.num_ended = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, now: float) -> Any:
        """One step of the engine, timed."""
        began = time.perf_counter()
        updates = self.inner.step(now)
        self.step_s.append(time.perf_counter() - began)
        self.num_tokens += sum(len(update.token_ids) for update in updates)
        self.num_ended += sum(update.finish_reason is not None for update in updates)
        return updates


@dataclass(frozen=True, kw_only=True)
class OfflineRun:
    """The figures of one run. Times in seconds.

    num_sequences: of all requests together; num_ended of them ended. num_prompt_tokens: of the requests that were begun.
    step_ratio: the share of the wall time that was spent in steps; the rest is tokenising, checking and text.
    """

    repeat: int
    num_sequences: int
    num_ended: int
    wall_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    num_steps: int
    num_preemptions: int
    step_ratio: float
    step_s: Spread | None
    interrupted: bool = False


def run_offline(
    model: OfflineModel,
    requests: Sequence[WorkloadRequest],
    *,
    repeat: int = 1,
    send_text: bool = False,
    ignore_eos: bool = True,
    progress: bool = False,
) -> OfflineRun:
    """Answer all requests, given at once. Ctrl-C ends the run, and what it had done is returned.

    Raises ConfigError for --send-text without texts, and ValueError, as the offline API does, for what can never be served.
    """
    prompts = [_prompt(request, send_text=send_text) for request in requests]
    params = [_params(request, ignore_eos=ignore_eos) for request in requests]
    timed = TimedEngine(model.engine)
    before = timed.stats()
    model.engine = timed
    interrupted = False
    began = time.perf_counter()
    try:
        model.generate(prompts, params, progress=progress)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        wall_s = max(time.perf_counter() - began, 1e-9)
        model.engine = timed.inner
    after = timed.stats()
    num_prompt = after.prompt_tokens - before.prompt_tokens
    return OfflineRun(
        repeat=repeat,
        num_sequences=sum(request.n for request in requests),
        num_ended=timed.num_ended,
        wall_s=wall_s,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=after.prefix_hit_tokens - before.prefix_hit_tokens,
        num_output_tokens=timed.num_tokens,
        output_tokens_per_s=timed.num_tokens / wall_s,
        total_tokens_per_s=(num_prompt + timed.num_tokens) / wall_s,
        num_steps=len(timed.step_s),
        num_preemptions=_num_preemptions(after) - _num_preemptions(before),
        step_ratio=sum(timed.step_s) / wall_s,
        step_s=spread(timed.step_s),
        interrupted=interrupted,
    )


def _num_preemptions(stats: Any) -> int:
    return int(stats.preemptions_recompute + stats.preemptions_swap)


def _prompt(request: WorkloadRequest, *, send_text: bool) -> str | dict[str, list[int]]:
    prompt = request.prompt_to_send(send_text=send_text)
    return prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}


def _params(request: WorkloadRequest, *, ignore_eos: bool) -> SamplingParams:
    fields = {"n": request.n, "max_tokens": request.max_tokens, "temperature": request.temperature}
    try:
        return SamplingParams(**{**fields, "ignore_eos": ignore_eos, **request.extra_body})
    except TypeError as e:
        raise ConfigError(
            f"extra_body of request {request.request_id} is no sampling parameter of the offline API: {e}; leave it out"
        ) from e
