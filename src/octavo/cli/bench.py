"""`octavo bench serve` and `octavo bench offline`: how fast is it? The work is done in `octavo.bench`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octavo.cli.bench_kernels import kernels
from octavo.cli.bench_options import LoadOptions, PromptOptions, ReportOptions, WorkloadOptions
from octavo.cli.command import SpreadCommand, command
from octavo.cli.offline import open_llm, refused_requests
from octavo.cli.options import EngineOptions, ModelArgument
from octavo.cli.terminal import say
from octavo.errors import BenchmarkError, ConfigError
from octavo.weights.locate import DEFAULT_MODEL

if TYPE_CHECKING:
    from octavo.bench.campaign import Campaign, Target
    from octavo.bench.machine import Machine
    from octavo.llm import LLM


def serve(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The server: http://host:port, or name=http://...")
    ],
    workload: WorkloadOptions,
    load: LoadOptions,
    prompts: PromptOptions,
    report: ReportOptions,
) -> None:
    """Measure a running server: any that offers /v1/completions as OpenAI does.

    Examples: octavo bench serve http://127.0.0.1:8000 --workload chats.jsonl --warmup 4;
    octavo bench serve http://127.0.0.1:8000 --rate 1 --rate 2 --slo ttft=0.5,tpot=0.05;
    octavo bench serve new=http://127.0.0.1:8000 --compare old=http://127.0.0.1:9000 --repeats 3 --fresh-cache.
    """
    import asyncio

    from octavo.bench.campaign import Procedure, check_targets, run_campaign
    from octavo.bench.machine import this_machine
    from octavo.bench.record import check_writable
    from octavo.bench.slo import parse_slo

    targets = _targets(url, report)
    check_targets(targets)
    procedure = Procedure(
        loads=load.loads(),
        repeats=prompts.repeats,
        warmup=prompts.warmup,
        fresh_cache=prompts.fresh_cache,
        slo=None if report.slo is None else parse_slo(report.slo),
    )
    if procedure.slo is not None and not load.stream and procedure.slo.needs_stream:
        raise ConfigError(
            "--slo limits ttft or tpot, which --no-stream cannot measure; leave one of them out"
        )
    settings, requests = load.settings(prompts), workload.requests(load.seed)
    for request in requests:
        request.prompt_to_send(send_text=prompts.send_text)
    if report.save is not None:
        check_writable(report.save)
    machine = this_machine()
    campaign = asyncio.run(run_campaign(targets, requests, settings, procedure, say))
    _report_campaign(campaign, machine, report.save)


def offline(
    engine: EngineOptions,
    workload: WorkloadOptions,
    prompts: PromptOptions,
    model: ModelArgument = DEFAULT_MODEL,
    save: Annotated[
        Path | None,
        typer.Option(
            help="Write everything to this JSON file as well.",
            rich_help_panel="Comparison and report",
            show_default="nowhere",
        ),
    ] = None,
) -> None:
    """Measure the engine in this process: all requests at once, no server.

    Example: octavo bench offline smollm2-135m-instruct --workload chats.jsonl
    """
    from octavo.bench.machine import this_machine
    from octavo.bench.offline import run_offline
    from octavo.bench.record import check_writable, offline_record, save_record
    from octavo.bench.report import console, print_offline
    from octavo.bench.workload import warmup_requests

    requests = workload.requests(engine.seed or 0)
    if save is not None:
        check_writable(save)
    machine = this_machine()
    llm = open_llm(model, engine)
    runs = []
    how: dict[str, Any] = {"send_text": prompts.send_text, "ignore_eos": prompts.ignore_eos}
    with refused_requests():
        if prompts.warmup:
            run_offline(llm, warmup_requests(requests, prompts.warmup), **how)
        for repeat in range(1, prompts.repeats + 1):
            if prompts.fresh_cache:
                forget_prefixes(llm)
            runs.append(run_offline(llm, requests, repeat=repeat, progress=True, **how))
            print_offline(runs[-1], console())
            if runs[-1].interrupted:
                break
    if save is not None:
        save_record(save, offline_record(runs, machine))
        say(f"saved in {save}")
    if runs[-1].interrupted:
        raise KeyboardInterrupt


def forget_prefixes(llm: LLM) -> None:
    """Empty the prefix cache of a model that has nothing under way."""
    llm.engine.scheduler.pool.drop_idle()


app = typer.Typer(
    name="bench",
    help="Measure a server, or the engine in this process.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
for _function in (serve, offline, kernels):
    app.command(cls=SpreadCommand)(command(_function))


def _targets(url: str, report: ReportOptions) -> list[Target]:
    from dataclasses import replace

    from octavo.bench.campaign import parse_target

    addresses = [url, *(report.compare or ())]
    pids: list[int] = report.server_pid or []
    if len(pids) > len(addresses):
        raise ConfigError(
            f"--server-pid is given {len(pids)} times for {len(addresses)} servers; leave some out"
        )
    each = [*pids, *[None] * (len(addresses) - len(pids))]
    targets = [parse_target(address, pid) for address, pid in zip(addresses, each, strict=True)]
    if report.label is not None:
        targets[0] = replace(targets[0], label=report.label)
    return targets


def _report_campaign(campaign: Campaign, machine: Machine, save: Path | None) -> None:
    """Show and save it. Raises BenchmarkError if requests failed, KeyboardInterrupt if it was cut off."""
    from octavo.bench.record import campaign_record, save_record
    from octavo.bench.report import console, print_campaign

    print_campaign(campaign, console())
    if save is not None:
        save_record(save, campaign_record(campaign, machine))
        say(f"saved in {save}")
    if campaign.interrupted:
        raise KeyboardInterrupt
    num_errors = sum(run.summary.num_errors for run in campaign.runs)
    if num_errors:
        raise BenchmarkError(f"{num_errors} requests failed; see the tables for the first error of each run")
