"""The page of metrics: frozen names, exact numbers, and what a request's timer observes."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from octavo.engine.messages import EngineStats
from octavo.engine.metrics import Histogram, Metrics, RequestTimer
from server_harness import Running, Serve

GOLDEN = Path(__file__).with_name("metric_names.txt")
STATS = EngineStats(
    num_running=1,
    num_waiting=2,
    num_swapped=3,
    blocks_total=4,
    blocks_used=5,
    blocks_cached=6,
    host_blocks_used=7,
    preemptions_recompute=8,
    preemptions_swap=9,
    prompt_tokens=10,
    generation_tokens=11,
    prefix_query_tokens=12,
    prefix_hit_tokens=13,
    recomputed_tokens=14,
    steps=15,
    step_tokens=16,
    compute_s=1.5,
    finished={"stop": 17, "abort": 18},
)


def samples(metrics: Metrics) -> dict[str, float]:
    """Sample name with labels -> value."""
    return {
        sample.name + "".join(f"{{{k}={v}}}" for k, v in sample.labels.items()): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def test_metric_names_are_frozen() -> None:
    families = text_string_to_metric_families(Metrics().render().decode())
    lines = [
        " ".join(
            [
                family.type,
                *sorted({s.name for s in family.samples}),
                *sorted({k for s in family.samples for k in s.labels}),
            ]
        )
        for family in families
    ]
    assert "\n".join(lines) + "\n" == GOLDEN.read_text(), "dashboards depend on these names"


def test_page_shows_the_latest_numbers_and_counts_nothing_twice() -> None:
    metrics = Metrics()
    for _ in range(3):
        metrics.update(STATS)
        seen = samples(metrics)
    assert {
        seen[f"octavo_{name}"] for name in ("requests_running", "requests_waiting", "requests_swapped")
    } == {1, 2, 3}
    assert seen["octavo_blocks_total"] == 4 and seen["octavo_blocks_used"] == 5
    assert seen["octavo_blocks_cached"] == 6 and seen["octavo_host_blocks_used"] == 7
    assert seen["octavo_preemptions_total{kind=recompute}"] == 8
    assert seen["octavo_preemptions_total{kind=swap}"] == 9
    names = (
        "prompt_tokens",
        "generation_tokens",
        "prefix_query_tokens",
        "prefix_hit_tokens",
        "recomputed_tokens",
    )
    assert seen["octavo_compute_seconds_total"] == 1.5
    assert [seen[f"octavo_{name}_total"] for name in (*names, "steps", "step_tokens")] == list(range(10, 17))
    assert seen["octavo_requests_finished_total{reason=stop}"] == 17
    assert seen["octavo_requests_finished_total{reason=abort}"] == 18
    assert seen["octavo_requests_finished_total{reason=length}"] == 0


def test_new_finish_reason_is_not_lost() -> None:
    metrics = Metrics()
    metrics.update(EngineStats(finished={"other": 2}))
    assert samples(metrics)["octavo_requests_finished_total{reason=other}"] == 2


def test_timer_observes_first_token_gaps_and_whole_request() -> None:
    metrics = Metrics()
    timer = RequestTimer(metrics, 10.0, num_prompt_tokens=100)
    timer.tokens(1, 10.5)
    timer.tokens(0, 10.6)
    timer.tokens(1, 10.7)
    timer.tokens(3, 11.0)
    timer.finished("length", 11.5)
    timer.finished("stop", 99.0)
    timer.tokens(1, 99.0)
    assert (metrics.first_token_s.count, metrics.first_token_s.sum) == (1, 0.5)
    assert metrics.token_gap_s.count == 4 and abs(metrics.token_gap_s.sum - 0.5) < 1e-9
    assert (metrics.request_s.count, metrics.request_s.sum) == (1, 1.5)
    assert (metrics.prompt_tokens.sum, metrics.generation_tokens.sum) == (100, 5)


def test_gaps_are_those_of_each_sequence() -> None:
    metrics = Metrics()
    timer = RequestTimer(metrics, 0.0)
    for now in (1.0, 3.0):
        timer.tokens(1, now, index=0)
        timer.tokens(1, now + 0.5, index=1)
    assert metrics.token_gap_s.count == 2 and metrics.token_gap_s.sum == 4.0
    assert metrics.first_token_s.count == 1


def test_aborted_requests_say_nothing_about_speed() -> None:
    metrics = Metrics()
    timer = RequestTimer(metrics, 0.0, num_prompt_tokens=3)
    timer.finished("abort", 5.0)
    assert metrics.request_s.count == metrics.prompt_tokens.count == metrics.generation_tokens.count == 0


@given(st.lists(st.floats(0, 100), max_size=30))
def test_buckets_count_values_up_to_their_edge(values: list[float]) -> None:
    histogram = Histogram("x", "x", (0.5, 1, 50))
    for value in values:
        histogram.observe(value)
    buckets = {s.labels["le"]: s.value for s in histogram.family().samples if s.name == "x_bucket"}
    assert list(buckets) == ["0.5", "1.0", "50.0", "+Inf"]
    for edge, count in buckets.items():
        assert count == sum(value <= float(edge) for value in values)


def test_route(server: Running, serve: Serve) -> None:
    response = server.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert list(text_string_to_metric_families(response.text))
    other = serve()
    other.engine.metrics.update(STATS)
    assert "octavo_requests_running 1.0" in other.http.get("/metrics").text
    assert "octavo_requests_running 0.0" in server.http.get("/metrics").text, "no registry is shared"
