"""What a step costs outside the kernels: schedule, commit and the report, with an executor that computes nothing.

    .venv/bin/python benchmarks/host_overhead.py [--sequences 64] [--context 300] [--profile]

Prints CPU time per step, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time

import msgspec

from octavo.engine.engine import Engine
from octavo.engine.messages import GenerateRequest, SequenceUpdate, StepReport
from octavo.memory.block_pool import BlockPool
from octavo.sampling_params import SamplingParams
from octavo.scheduler.limits import Limits
from octavo.scheduler.plan import SampledToken, StepPlan, StepResult
from octavo.scheduler.policies import POLICIES
from octavo.scheduler.scheduler import Scheduler

_STEPS = 200


class NullExecutor:
    """Says token 7 to everybody."""

    def execute(self, plan: StepPlan) -> StepResult:
        return StepResult({item.sequence_id: SampledToken(7) for item in plan.items if item.sample}, {})


def engine_of(num_sequences: int, context: int) -> Engine:
    """An engine whose sequences have all computed their prompts."""
    blocks = num_sequences * ((context + 2 * _STEPS) // 16 + 2)
    engine = Engine(
        Scheduler(
            pool=BlockPool(blocks, 16),
            host=BlockPool(0, 16),
            policy=POLICIES.load("fcfs")(),
            limits=Limits(8192, blocks * 16, 50_000, frozenset({2})),
            max_num_seqs=num_sequences,
            token_budget=512,
        ),
        NullExecutor(),
    )
    params = SamplingParams(max_tokens=2 * _STEPS, temperature=0)
    for i in range(num_sequences):
        prompt = tuple(range(i, i + context))
        assert not engine.submit(GenerateRequest(f"r{i}", prompt, params), 0.0)
    while any(s.gap > 1 for s in engine.scheduler.running) or engine.scheduler.pending:
        engine.step(0.0)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--context", type=int, default=300)
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    options = parser.parse_args()
    engine = engine_of(options.sequences, options.context)
    encoder = msgspec.msgpack.Encoder()
    gc.collect()
    gc.freeze()

    def step() -> None:
        updates: list[SequenceUpdate] = engine.step(0.0)
        encoder.encode(StepReport(tuple(updates), engine.stats(), 0.0))

    profile = cProfile.Profile()
    if options.profile:
        profile.enable()
    began = time.thread_time()
    for _ in range(_STEPS):
        step()
    per_step_ms = (time.thread_time() - began) / _STEPS * 1e3
    profile.disable()
    print(f"{options.sequences} sequences of {options.context} tokens: {per_step_ms:.3f} ms of CPU per step")
    if options.profile:
        pstats.Stats(profile).sort_stats("tottime").print_stats(18)


if __name__ == "__main__":
    main()
