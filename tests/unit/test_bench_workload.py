"""What a benchmark asks, and when: files, random prompts, arrivals."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from octavo.bench.arrivals import arrivals_at, unit_arrivals
from octavo.bench.workload import WorkloadRequest, random_workload, read_workload, warmup_requests
from octavo.errors import ConfigError

WORKLOADS = Path(__file__).parents[2] / "benchmarks" / "workloads"


def written(folder: Path, *lines: Any) -> Path:
    file = folder / "w.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return file


def requests_due(*arrivals: float | None) -> list[WorkloadRequest]:
    return [
        WorkloadRequest(request_id=str(i), prompt="x", max_tokens=1, arrival_s=arrival)
        for i, arrival in enumerate(arrivals)
    ]


# --- files


def test_line_becomes_a_request_with_all_its_fields(tmp_path: Path) -> None:
    line = {
        "id": "a",
        "prompt": "Hi",
        "prompt_token_ids": [1, 2],
        "max_tokens": 3,
        "temperature": 1.0,
        "n": 4,
        "arrival_s": 0.5,
        "extra_body": {"top_k": 5},
    }
    [request] = read_workload(written(tmp_path, line, ""))
    assert request == WorkloadRequest(
        request_id="a",
        prompt="Hi",
        prompt_token_ids=(1, 2),
        max_tokens=3,
        temperature=1.0,
        n=4,
        arrival_s=0.5,
        extra_body={"top_k": 5},
    )


def test_line_needs_little(tmp_path: Path) -> None:
    [request] = read_workload(written(tmp_path, {"prompt": "Hi", "max_tokens": 3}))
    assert (request.request_id, request.temperature, request.n, request.arrival_s) == ("line-1", 0.0, 1, None)


def test_token_ids_are_sent_unless_text_is_asked_for(tmp_path: Path) -> None:
    both = {"prompt": "Hi", "prompt_token_ids": [1, 2], "max_tokens": 1}
    [request, ids_only] = read_workload(
        written(tmp_path, both, {"prompt_token_ids": [3], "max_tokens": 1, "id": "b"})
    )
    assert request.prompt_to_send(send_text=False) == [1, 2]
    assert request.prompt_to_send(send_text=True) == "Hi"
    with pytest.raises(ConfigError, match="request b has token ids and no text; leave out --send-text"):
        ids_only.prompt_to_send(send_text=True)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "truncated"),
        ("[1]", "Expected `object`"),
        ({"prompt": "x"}, "max_tokens"),
        ({"max_tokens": 1}, "there is no prompt; give prompt or prompt_token_ids"),
        ({"prompt": "", "max_tokens": 1}, "there is no prompt"),
        ({"prompt_token_ids": [], "max_tokens": 1}, "there is no prompt"),
        ({"prompt_token_ids": [-1], "max_tokens": 1}, "prompt_token_ids"),
        ({"prompt_token_ids": ["a"], "max_tokens": 1}, "prompt_token_ids"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_token": 8, "max_tokens": 8}, "max_token"),
        ({"prompt": "x", "max_tokens": 1, "n": 0}, "n"),
        ({"prompt": "x", "max_tokens": 1, "arrival_s": -1}, "arrival_s"),
    ],
)
def test_bad_line_is_named_with_its_file_and_number(tmp_path: Path, line: Any, fault: str) -> None:
    file = written(tmp_path, {"prompt": "x", "max_tokens": 1}, line)
    with pytest.raises(ConfigError) as caught:
        read_workload(file)
    assert caught.value.message.startswith(f"{file}:2: ")
    assert fault in caught.value.message


def test_file_that_is_missing_empty_or_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the workload"):
        read_workload(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match="is empty"):
        read_workload(written(tmp_path, ""))
    file = written(tmp_path, {"prompt": "x", "max_tokens": 1})
    with pytest.raises(ConfigError, match="has 1 requests, --num-requests asks for 2"):
        read_workload(file, 2)


@pytest.mark.parametrize("file", sorted(WORKLOADS.glob("*.jsonl")), ids=lambda file: file.stem)
def test_workloads_of_the_project_can_be_read(file: Path) -> None:
    assert all(request.prompt_token_ids for request in read_workload(file))


# --- random prompts


def test_random_prompts_have_the_lengths_the_prefix_and_the_seed_they_were_asked_for() -> None:
    ask = {"num_requests": 5, "input_len": 10, "output_len": 3, "shared_prefix_len": 4, "vocab_size": 50}
    requests = random_workload(**ask, seed=1)
    prompts = [request.prompt_token_ids or () for request in requests]
    assert [len(prompt) for prompt in prompts] == [10] * 5
    assert {prompt[:4] for prompt in prompts} == {prompts[0][:4]}
    assert len({prompt[4:] for prompt in prompts}) == 5
    assert all(0 <= token < 50 for prompt in prompts for token in prompt)
    assert {request.max_tokens for request in requests} == {3}
    assert requests == random_workload(**ask, seed=1) != random_workload(**ask, seed=2)


@pytest.mark.parametrize(
    ("wrong", "flag"),
    [
        ({"input_len": 0}, "--input-len is 0"),
        ({"output_len": -1}, "--output-len is -1"),
        ({"shared_prefix_len": 11}, "--shared-prefix-len is 11"),
        ({"vocab_size": 0}, "--vocab-size is 0"),
    ],
)
def test_impossible_lengths_are_refused(wrong: dict[str, int], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        random_workload(**{"num_requests": 1, "input_len": 10, "output_len": 1, **wrong})


def test_warm_up_leaves_no_prefix_of_the_workload_behind() -> None:
    requests = [WorkloadRequest(request_id="a", prompt="abc", prompt_token_ids=(1, 2, 3), max_tokens=99)]
    first, second = warmup_requests(requests, 2)
    assert (first.prompt, first.prompt_token_ids, first.max_tokens) == ("cba", (3, 2, 1), 16)
    assert first.request_id != second.request_id


# --- arrivals


def test_poisson_gaps_have_mean_and_deviation_of_one() -> None:
    times = unit_arrivals(20_000, seed=3)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert statistics.fmean(gaps) == pytest.approx(1, abs=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1, abs=0.03)
    # Arrivals in a unit of time are Poisson: mean and variance 1, none at all in 1/e of them.
    counts = [0] * 19_000
    for time in times:
        if time < len(counts):
            counts[int(time)] += 1
    assert statistics.variance(counts) == pytest.approx(1, abs=0.05)
    assert counts.count(0) / len(counts) == pytest.approx(0.3679, abs=0.01)


def test_same_seed_gives_the_same_pattern_at_every_rate() -> None:
    requests = requests_due(None, None, None)
    slow, fast = (arrivals_at(requests, rate, seed=5) for rate in (1.0, 4.0))
    assert fast == pytest.approx([time / 4 for time in slow])
    assert slow == arrivals_at(requests, 1.0, seed=5) != arrivals_at(requests, 1.0, seed=6)


def test_arrivals_of_the_workload_itself_are_stretched() -> None:
    assert arrivals_at(requests_due(0.0, 1.0, 3.0), 2.0, seed=0) == [0.0, 0.5, 1.5]
    with pytest.raises(ConfigError, match="give it to all or to none"):
        arrivals_at(requests_due(1.0, None), 1.0, seed=0)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_rate_must_be_a_positive_number(rate: float) -> None:
    with pytest.raises(ConfigError, match="--rate is"):
        arrivals_at(requests_due(1.0), rate, seed=0)
