"""Options of `octavo bench`: what is asked, how it is sent, what is reported."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo.bench.client import RequestSettings
    from octavo.bench.load import Load
    from octavo.bench.workload import WorkloadRequest

_WORKLOAD = "Workload"
_LOAD = "Load"
_REQUESTS = "Requests"
_REPORT = "Comparison and report"

DATASETS = ("random",)
_DEFAULT_NUM_REQUESTS = 32


def _option(panel: str, help_text: str, *flags: str, default: str | None = None, **more: Any) -> Any:
    shown: bool | str = True if default is None else default
    return typer.Option(..., *flags, help=help_text, rich_help_panel=panel, show_default=shown, **more)


@dataclass(frozen=True, kw_only=True)
class WorkloadOptions:
    """What is asked: the lines of a file, or random prompts."""

    workload: Annotated[
        Path | None,
        _option(
            _WORKLOAD,
            "JSONL file, a request a line: prompt or prompt_token_ids, max_tokens, and if wanted id, temperature, n,"
            " arrival_s, extra_body.",
            default="random prompts",
        ),
    ] = None
    dataset: Annotated[str, _option(_WORKLOAD, f"What to ask without --workload: {', '.join(DATASETS)}.")] = (
        "random"
    )
    num_requests: Annotated[
        int | None,
        _option(
            _WORKLOAD,
            "Requests to send: the first of the file, or so many random ones.",
            default=f"all of the file, or {_DEFAULT_NUM_REQUESTS} random ones",
            min=1,
        ),
    ] = None
    input_len: Annotated[int, _option(_WORKLOAD, "Tokens of a random prompt, shared prefix included.")] = 256
    output_len: Annotated[int, _option(_WORKLOAD, "New tokens for each random prompt.")] = 128
    shared_prefix_len: Annotated[
        int, _option(_WORKLOAD, "Tokens with which all random prompts begin alike.")
    ] = 0
    vocab_size: Annotated[int, _option(_WORKLOAD, "Random token ids are below this.")] = 32000

    def requests(self, seed: int) -> list[WorkloadRequest]:
        """The requests in order. Raises ConfigError for a file, a line or a number that cannot be used.

        seed: of random prompts.
        """
        from octavo.bench.workload import random_workload, read_workload

        if self.workload is not None:
            return read_workload(self.workload, self.num_requests)
        if self.dataset not in DATASETS:
            raise ConfigError(f"--dataset is {self.dataset!r}; there is: {', '.join(DATASETS)}")
        return random_workload(
            num_requests=self.num_requests or _DEFAULT_NUM_REQUESTS,
            input_len=self.input_len,
            output_len=self.output_len,
            shared_prefix_len=self.shared_prefix_len,
            vocab_size=self.vocab_size,
            seed=seed,
        )


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """How prompts are given and answers end, online as offline."""

    send_text: Annotated[
        bool, _option(_REQUESTS, "Send the text of prompts that have token ids as well.", "--send-text")
    ] = False
    ignore_eos: Annotated[
        bool, _option(_REQUESTS, "Make every answer as long as max_tokens says, so that lengths are fixed.")
    ] = True
    warmup: Annotated[
        int,
        _option(_LOAD, "Requests to send before anything is measured; their prompts are not reused.", min=0),
    ] = 0
    repeats: Annotated[int, _option(_LOAD, "Runs of everything.", min=1)] = 1
    fresh_cache: Annotated[
        bool,
        _option(
            _REQUESTS, "Let no run find in the prefix cache what an earlier one left there.", "--fresh-cache"
        ),
    ] = False


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """How fast requests are sent, and how each is."""

    concurrency: Annotated[
        int | None,
        _option(_LOAD, "Closed loop: most requests in flight.", default="all at once", min=1),
    ] = None
    rate: Annotated[
        list[float] | None,
        _option(
            _LOAD,
            "Open loop: requests a second, with Poisson arrivals. Repeat it for a sweep.",
            default="closed loop",
            metavar="RATE...",
        ),
    ] = None
    seed: Annotated[int, _option(_LOAD, "Seed of random prompts and of arrivals.")] = 0
    stream: Annotated[
        bool, _option(_REQUESTS, "Stream answers; without that there is no TTFT, TPOT and ITL.")
    ] = True
    model: Annotated[
        str | None, _option(_REQUESTS, "Model to ask for.", default="the first of /v1/models")
    ] = None
    extra_body: Annotated[
        str | None, _option(_REQUESTS, "JSON object whose fields go into every request.", metavar="JSON")
    ] = None
    api_key: Annotated[
        str | None,
        _option(_REQUESTS, "Key to send as a bearer token.", envvar="OPENAI_API_KEY", default="none"),
    ] = None
    timeout_s: Annotated[float, _option(_REQUESTS, "Seconds after which a request failed.", min=0.001)] = (
        1800.0
    )

    def loads(self) -> tuple[Load, ...]:
        """The load of each run of a repeat. Raises ConfigError for values that exclude each other."""
        from octavo.bench.load import Load

        if not self.rate:
            return (Load(concurrency=self.concurrency),)
        if len(set(self.rate)) < len(self.rate):
            raise ConfigError("--rate has a value twice; use --repeats to run a rate again")
        return tuple(Load(concurrency=self.concurrency, rate=rate, seed=self.seed) for rate in self.rate)

    def settings(self, prompts: PromptOptions) -> RequestSettings:
        """How requests are sent. Raises ConfigError for an --extra-body that is no JSON object."""
        from octavo.bench.client import RequestSettings

        return RequestSettings(
            model=self.model,
            send_text=prompts.send_text,
            stream=self.stream,
            ignore_eos=prompts.ignore_eos,
            extra_body=_json_object(self.extra_body),
            api_key=self.api_key,
            timeout_s=self.timeout_s,
        )


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """What else is measured, and where it goes."""

    label: Annotated[
        str | None, _option(_REPORT, "What to call the first server.", default="its host and port")
    ] = None
    compare: Annotated[
        list[str] | None,
        _option(
            _REPORT,
            "Another server to run the same workload against, in turn: URL or name=URL. May be repeated.",
            metavar="URL...",
            default="none",
        ),
    ] = None
    server_pid: Annotated[
        list[int] | None,
        _option(
            _REPORT,
            "Process whose memory, children included, is watched. Repeat it for the servers of --compare.",
            metavar="PID...",
            default="none",
        ),
    ] = None
    slo: Annotated[
        str | None,
        _option(
            _REPORT, "Limits in seconds for goodput, such as ttft=0.5,tpot=0.05 (also e2e).", default="none"
        ),
    ] = None
    save: Annotated[
        Path | None, _option(_REPORT, "Write everything to this JSON file as well.", default="nowhere")
    ] = None


def _json_object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        fields = json.loads(text)
    except ValueError as e:
        raise ConfigError(f'--extra-body is no JSON: {e}; give an object such as {{"top_k": 1}}') from e
    if not isinstance(fields, dict):
        raise ConfigError(f'--extra-body is {text}; give a JSON object such as {{"top_k": 1}}')
    return fields
