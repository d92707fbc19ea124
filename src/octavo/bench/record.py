"""A campaign as JSON, whole: machine, versions, command, every run and every request. Times in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.bench.campaign import Campaign, Run
from octavo.bench.comparison import compare
from octavo.bench.machine import Machine
from octavo.bench.offline import OfflineRun
from octavo.bench.outcome import Outcome
from octavo.bench.timing import itl_s, latency_s, tpot_s, ttft_s
from octavo.errors import ConfigError

FORMAT = 1


def campaign_record(campaign: Campaign, machine: Machine) -> dict[str, Any]:
    """All of it as plain data. How it was run is the command in `machine`."""
    loads = list(dict.fromkeys(run.load for run in campaign.runs))
    return {
        "format": FORMAT,
        "machine": msgspec.to_builtins(machine),
        "servers": {
            label: {"model": model, "version": campaign.versions.get(label)}
            for label, model in campaign.models.items()
        },
        "interrupted": campaign.interrupted,
        "runs": [run_record(run) for run in campaign.runs],
        "comparison": [
            {
                "load": str(load),
                "figures": msgspec.to_builtins(compare([r for r in campaign.runs if r.load == load])),
            }
            for load in loads
        ],
    }


def run_record(run: Run) -> dict[str, Any]:
    """One run as plain data, with a line for each request."""
    return {
        "label": run.label,
        "load": msgspec.to_builtins(run.load),
        "repeat": run.repeat,
        "cache_salt": run.cache_salt,
        "summary": msgspec.to_builtins(run.summary),
        "memory": msgspec.to_builtins(run.memory),
        "requests": [_request_record(outcome) for outcome in run.outcomes],
    }


def offline_record(runs: Sequence[OfflineRun], machine: Machine) -> dict[str, Any]:
    """Offline runs as plain data."""
    return {"format": FORMAT, "machine": msgspec.to_builtins(machine), "runs": msgspec.to_builtins(runs)}


def check_writable(file: Path) -> None:
    """Find out before the work is done, not after. Raises ConfigError."""
    try:
        file.open("a").close()
    except OSError as e:
        raise ConfigError(f"cannot write to {file}: {e.strerror}; give another file to --save") from e


def save_record(file: Path, record: Mapping[str, Any]) -> None:
    """Write it, indented. Raises ConfigError if the file cannot be written."""
    try:
        file.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    except OSError as e:
        raise ConfigError(f"cannot write to {file}: {e.strerror}; give another file to --save") from e


def _request_record(outcome: Outcome) -> dict[str, Any]:
    """Without each token's time, which would be a thousand times as long; the summary has their spread."""
    gaps = itl_s(outcome)
    return {
        "id": outcome.request_id,
        "error": outcome.error,
        "doubt": outcome.doubt(),
        "due_s": _rounded(outcome.due_s),
        "sent_s": _rounded(outcome.sent_s),
        "done_s": _rounded(outcome.done_s),
        "ttft_s": _rounded(ttft_s(outcome)),
        "tpot_s": _rounded(tpot_s(outcome)),
        "max_itl_s": _rounded(max(gaps) if gaps else None),
        "e2e_s": _rounded(latency_s(outcome)),
        "num_prompt_tokens": outcome.prompt_tokens,
        "num_output_tokens": outcome.num_output_tokens,
        "num_cached_tokens": outcome.num_cached_tokens,
        "text_digest": outcome.text_digest,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
