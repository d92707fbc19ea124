"""What crosses the border between the faces and the engine process, as typed messages (msgspec, never pickle).

face -> engine   Start (once), then Submit, Finish, Stop
engine -> face   Ready | Failed (once, at start), then StepReport after every step; Failed again if the engine dies
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from octavo.config import EngineConfig
from octavo.outputs import EngineFacts, TokenLogprobs
from octavo.sampling_params import SamplingParams


@dataclass(frozen=True)
class GenerateRequest:
    """One prompt with its parameters, ready for the engine. A lower `priority` number goes first.

    prompt_token_ids are already truncated; `cache_salt` separates the prefix caches of tenants.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first message: what to build, and how much to log."""

    config: EngineConfig
    log_level: str = "INFO"


class Submit(msgspec.Struct, tag=True, frozen=True):
    requests: tuple[GenerateRequest, ...]


class Finish(msgspec.Struct, tag=True, frozen=True):
    """End a request (or one of its sequences) from outside. reason: "abort" (client gone) or "stop" (stop string seen)."""

    request_id: str
    index: int | None = None
    reason: str = "abort"


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Leave the loop and exit."""


class SequenceUpdate(msgspec.Struct, frozen=True, array_like=True):
    """News of one sequence. finish_reason "error" carries its message in `error`."""

    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """Gauges as they are now and counters since start. Counts of sequences, blocks and tokens; seconds."""

    num_running: int = 0
    num_waiting: int = 0
    num_swapped: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    host_blocks_used: int = 0
    preemptions_recompute: int = 0
    preemptions_swap: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    step_tokens: int = 0
    compute_s: float = 0.0
    finished: dict[str, int] = {}


class StepReport(msgspec.Struct, tag=True, frozen=True):
    """After every step, also one without news, so that a face can tell a slow engine from a stuck one.

    host_s: what the step took outside the kernels (taking messages, schedule, commit, and the report before this one); None
    if no step was made.
    """

    updates: tuple[SequenceUpdate, ...]
    stats: EngineStats
    host_s: float | None = None


class Ready(msgspec.Struct, tag=True, frozen=True):
    facts: EngineFacts


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot start or go on. `reason` is the root cause in one line.

    code: that of the OctavoError it was, if the user can mend it; None if the fault is ours or the machine's.
    """

    reason: str
    code: str | None = None


ToEngine = Submit | Finish | Stop
FromEngine = Ready | Failed | StepReport
