"""Drives a real engine on token ids, without tokenizer, process or socket: what the equivalence suite compares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.engine.messages import GenerateRequest
from octavo.sampling_params import SamplingParams

Prompt = Sequence[int]


@dataclass
class Answer:
    """What one sequence brought, all steps together."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    num_cached: int = 0
    prompt_logprobs: list[dict[int, float]] = field(default_factory=list)


def make_engine(model: Path, **options: Any) -> Engine:
    """An engine in float32 that checks all invariants after each step. Options: fields of the config's parts."""
    chosen = {k: options.pop(k) for k in list(options) if k in ModelConfig.__dataclass_fields__}
    cache = {k: options.pop(k) for k in list(options) if k in CacheConfig.__dataclass_fields__}
    scheduler = {k: options.pop(k) for k in list(options) if k in SchedulerConfig.__dataclass_fields__}
    cache.setdefault("num_blocks", 4096 // cache.get("block_size", 16))
    config = EngineConfig(
        # Nothing is left in the home of who runs the tests.
        model=ModelConfig(**{"path": str(model), "dtype": "float32", "weight_cache": False, **chosen}),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(**scheduler),
        seed=0,
        # Tiny models gain nothing from threads, and lose much to them on a busy machine.
        num_threads=options.pop("num_threads", 1),
        check=options.pop("check", True),
        **options,
    )
    return build_engine(config)[0]


def run(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    before_step: Callable[[Engine, int], None] | None = None,
    max_steps: int = 20_000,
) -> list[Answer]:
    """Submit all prompts at once and step until all have ended. Returns the answers of index 0, in order."""
    return [
        answers[0]
        for answers in run_all(engine, prompts, params, before_step=before_step, max_steps=max_steps)
    ]


def run_all(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    before_step: Callable[[Engine, int], None] | None = None,
    max_steps: int = 20_000,
) -> list[list[Answer]]:
    """As `run`, with the answers of all n sequences of each prompt."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    answers = {str(i): [Answer() for _ in range(p.n)] for i, p in enumerate(each)}
    for i, (prompt, chosen) in enumerate(zip(prompts, each, strict=True)):
        assert not engine.submit(GenerateRequest(str(i), tuple(prompt), chosen), now=0.0)
    step = 0
    while engine.has_work:
        if before_step is not None:
            before_step(engine, step)
        for update in engine.step(now=float(step)):
            answer = answers[update.request_id][update.index]
            answer.token_ids.extend(update.token_ids)
            answer.logprobs.extend(update.logprobs or ())
            answer.prompt_logprobs.extend(update.prompt_logprobs or ())
            answer.finish_reason = update.finish_reason
            answer.error = update.error
            answer.num_cached = update.num_cached_tokens
        step += 1
        assert step < max_steps, "the engine makes no progress"
    assert engine.scheduler.pool.num_used == engine.scheduler.host.num_used == 0
    return list(answers.values())
