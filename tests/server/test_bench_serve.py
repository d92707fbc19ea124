"""`octavo bench serve` against a real server on a real socket, with a fake engine behind it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fake_engine import FACTS, FakeEngine
from octavo.bench.campaign import Campaign
from octavo.cli.main import app
from server_harness import Running, Serve

LONG = "one two three four " * 20


def bench(*args: str) -> Any:
    return CliRunner().invoke(app, ["bench", "serve", *args])


def saved(*args: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """The command's result, and what it wrote."""
    file = folder / "saved.json"
    result = bench(*args, "--save", str(file))
    return result, json.loads(file.read_text())


def random_prompts(count: int, output_len: int = 6) -> list[str]:
    return f"--num-requests {count} --input-len 12 --output-len {output_len} --vocab-size 200".split()


@pytest.fixture
def talker(serve: Serve) -> Running:
    """A server whose answers are as long as they are asked to be."""
    return serve(FakeEngine(says=LONG, cached=3))


@pytest.fixture
def broken(serve: Serve) -> Running:
    """A server whose engine dies after two tokens."""
    return serve(FakeEngine(says=LONG, fail_after=2))


def test_streamed_run_is_counted_timed_and_shown(talker: Running, tmp_path: Path) -> None:
    result, record = saved(
        talker.url, *random_prompts(5), "--concurrency", "2", "--slo", "ttft=60,tpot=60", folder=tmp_path
    )
    assert result.exit_code == 0, result.output
    assert "TTFT ms" in result.stdout and "5 of 5" in result.stdout
    [run] = record["runs"]
    summary = run["summary"]
    assert (summary["num_ok"], summary["num_errors"], summary["num_doubtful"]) == (5, 0, 0)
    assert (summary["num_prompt_tokens"], summary["num_output_tokens"]) == (60, 30)
    assert summary["cached_ratio"] == pytest.approx(3 / 12)
    assert summary["goodput"]["num_met"] == 5
    for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s"):
        assert 0 < summary[name]["p50"] <= summary[name]["p99"] <= summary[name]["max"]
    assert summary["itl_s"]["count"] == 5 * 5
    assert [request["num_output_tokens"] for request in run["requests"]] == [6] * 5
    assert record["servers"][talker.url.removeprefix("http://")]["model"] == "org/fake-model"
    assert record["machine"]["num_cpus"] >= 1 and record["machine"]["command"]


def test_all_that_was_asked_reaches_the_server(talker: Running, tmp_path: Path) -> None:
    file = tmp_path / "w.jsonl"
    lines = [
        {"prompt_token_ids": [72, 105], "max_tokens": 4, "n": 2, "temperature": 0.5},
        {"prompt": "Hi", "max_tokens": 3},
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    result = bench(
        talker.url, "--workload", str(file), "--concurrency", "1", "--extra-body", '{"top_k": 3}', "--fresh-cache",
        "--warmup", "1", "--repeats", "2",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    warm, *asked = talker.engine.requests
    assert warm.prompt_token_ids == (105, 72), "backwards"
    assert [request.prompt_token_ids for request in asked] == [(72, 105)] * 4
    assert [request.params.max_tokens for request in asked] == [4, 3] * 2
    assert [(request.params.n, request.params.temperature) for request in asked[:2]] == [(2, 0.5), (1, 0.0)]
    assert all(request.params.ignore_eos and request.params.top_k == 3 for request in asked)
    salts = [request.cache_salt for request in asked]
    assert salts[0] == salts[1] != salts[2] == salts[3]
    assert warm.cache_salt not in salts


def test_reply_may_come_whole(talker: Running, tmp_path: Path) -> None:
    result, record = saved(talker.url, *random_prompts(2), "--no-stream", folder=tmp_path)
    assert result.exit_code == 0, result.output
    summary = record["runs"][0]["summary"]
    assert (summary["num_output_tokens"], summary["num_doubtful"]) == (12, 0)
    assert (summary["ttft_s"], summary["tpot_s"], summary["itl_s"]) == (None, None, None)
    assert summary["e2e_s"]["p50"] > 0


def test_request_that_failed_is_an_error_in_the_table_and_the_exit_code(
    broken: Running, tmp_path: Path
) -> None:
    result, record = saved(broken.url, *random_prompts(3), folder=tmp_path)
    assert result.exit_code == 1
    assert "3 requests failed" in result.stderr
    assert "out of memory" in result.stdout
    summary = record["runs"][0]["summary"]
    assert (summary["num_ok"], summary["num_errors"], summary["num_output_tokens"]) == (0, 3, 0)
    assert summary["e2e_s"] is None
    assert all("out of memory" in request["error"] for request in record["runs"][0]["requests"])


def test_refused_request_is_an_error_with_its_reason(talker: Running, tmp_path: Path) -> None:
    result, record = saved(talker.url, *random_prompts(1, output_len=9999), folder=tmp_path)
    assert result.exit_code == 1
    assert "HTTP 400" in record["runs"][0]["summary"]["first_error"]


def test_model_may_be_named(talker: Running, tmp_path: Path) -> None:
    result, record = saved(talker.url, *random_prompts(1), "--model", "other", folder=tmp_path)
    assert result.exit_code == 1
    assert "HTTP 404" in record["runs"][0]["summary"]["first_error"]


def test_request_that_takes_too_long_is_an_error(serve: Serve, tmp_path: Path) -> None:
    silent = serve(FakeEngine(pause_after=0))
    result, record = saved(silent.url, *random_prompts(1), "--timeout-s", "0.2", folder=tmp_path)
    assert result.exit_code == 1
    assert "TimeoutError" in record["runs"][0]["summary"]["first_error"]


def test_answer_of_another_length_is_doubtful(serve: Serve, tmp_path: Path) -> None:
    result, record = saved(serve(FakeEngine(says="Hi")).url, *random_prompts(1), folder=tmp_path)
    assert result.exit_code == 0
    assert record["runs"][0]["summary"]["first_doubt"] == "6 new tokens were asked for, 3 came"
    assert "6 new tokens were asked for" in result.stdout


def test_servers_take_turns_and_are_compared(talker: Running, broken: Running, tmp_path: Path) -> None:
    result, record = saved(
        f"a={talker.url}", "--compare", f"b={broken.url}", *random_prompts(2), "--repeats", "2", "--rate", "500", "900",
        folder=tmp_path,
    )  # fmt: skip
    assert result.exit_code == 1, "b fails"
    order = [(run["repeat"], run["load"]["rate"], run["label"]) for run in record["runs"]]
    assert order == [(r, rate, label) for r in (1, 2) for rate in (500.0, 900.0) for label in "ab"]
    [slow, fast] = record["comparison"]
    assert (slow["load"], fast["load"]) == ("500 req/s", "900 req/s")
    figures = {figure["metric"]: figure for figure in slow["figures"]}
    assert figures["errors"]["medians"] == {"a": 0, "b": 2}
    assert figures["output tokens"]["ratios"] == {"a": 1, "b": 0}
    assert "medians of all runs" in result.stdout


def test_key_is_sent_and_not_written_down(serve: Serve, tmp_path: Path) -> None:
    guarded = serve(FakeEngine(says=LONG), api_key="secret")
    result, record = saved(guarded.url, *random_prompts(1), "--api-key", "secret", folder=tmp_path)
    assert result.exit_code == 0, result.output
    assert "secret" not in json.dumps(record)
    refused = bench(guarded.url, *random_prompts(1), "--api-key", "wrong")
    assert refused.exit_code == 1
    assert "HTTP 401" in refused.stderr and "--api-key" in refused.stderr


def test_being_cut_off_shows_and_saves_what_there_is(
    talker: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.bench import campaign

    measure = campaign.run_campaign

    async def cut_off(*args: Any) -> Campaign:
        found = await measure(*args)
        found.interrupted = True
        return found

    monkeypatch.setattr(campaign, "run_campaign", cut_off)
    result, record = saved(talker.url, *random_prompts(1), folder=tmp_path)
    assert result.exit_code == 130
    assert "interrupted" in result.stdout and "output tokens" in result.stdout
    assert record["interrupted"] is True


def test_failed_warm_up_ends_the_benchmark(broken: Running) -> None:
    result = bench(broken.url, *random_prompts(1), "--warmup", "1")
    assert result.exit_code == 1
    assert "warm-up" in result.stderr and "out of memory" in result.stderr


def test_server_that_is_not_there_is_one_line(talker: Running) -> None:
    result = bench("http://127.0.0.1:9", *random_prompts(1))
    assert result.exit_code == 1
    assert result.stderr.startswith("error: no OpenAI-compatible server at http://127.0.0.1:9")
    assert result.stderr.count("\n") == 1
    assert FACTS.model == "org/fake-model"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--concurrency 2 --rate 1", "leave one out"),
        ("--rate 0", "--rate is 0"),
        ("--rate 1 1", "--rate has a value twice"),
        ("--slo ttft=1 --no-stream", "--no-stream"),
        ("--slo quick", "ttft=0.5,tpot=0.05"),
        ("--extra-body 1", "--extra-body is 1"),
        ("--extra-body {", "--extra-body is no JSON"),
        ("--dataset none", "there is: random"),
        ("--workload none.jsonl", "cannot read the workload none.jsonl"),
        ("--send-text", "leave out --send-text"),
        ("--server-pid 1 2", "leave some out"),
        ("--server-pid 999999999", "no such process"),
        ("--compare nonsense", "'nonsense' is no address"),
        ("--compare URL --label x", "two servers are called"),
        ("--save /no/such/folder/x.json", "give another file to --save"),
        ("--repeats 0", "--repeats"),
        ("--no-such-flag", "--no-such-flag"),
    ],
)
def test_bad_option_exits_with_2_before_anything_is_sent(server: Running, flags: str, message: str) -> None:
    before = len(server.engine.requests)
    words = [f"x={server.url}" if word == "URL" else word for word in flags.split()]
    result = bench(server.url, *random_prompts(1), *words)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.stderr.split())
    assert "Traceback" not in result.output
    assert len(server.engine.requests) == before
