"""What an operator sees: every number of a running server, in Prometheus' text format.

There are two kinds of numbers. Those of the engine come as `EngineStats` with each step report: gauges as they
are now, counters since start. They are stored as one reference and read only when somebody asks for the page,
so nothing is ever counted twice and an idle server does nothing. Those of a request (how long until the first
token, and so on) are seen by whoever hands out its tokens; `RequestTimer` feeds them to the histograms here.

    engine --EngineStats--> Metrics.update        GET /metrics --> Metrics.render
    tokens of a request --> RequestTimer --> histograms

There is no clock here: times are passed in, in seconds, all from one monotonic clock. The names are an
interface: the test `test_metric_names_are_frozen` holds them, and a change of one is a breaking change.

The histograms are our own twenty lines because the library's would publish a time of creation beside each of
them, which can only be switched off for a whole process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.registry import Collector

from octavo.engine.messages import EngineStats

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
FINISH_REASONS = ("stop", "length", "abort", "error")

# name without prefix, field of EngineStats, help
_GAUGES = (
    (
        "requests_running",
        "num_running",
        "Sequences with tokens in the current steps (n of a request count n times)",
    ),
    ("requests_waiting", "num_waiting", "Sequences waiting for their first or their next admission"),
    ("requests_swapped", "num_swapped", "Sequences whose blocks are in the host store"),
    ("blocks_total", "blocks_total", "Blocks of the pool"),
    ("blocks_used", "blocks_used", "Blocks held by live sequences"),
    ("blocks_cached", "blocks_cached", "Idle blocks whose content can still be found by the prefix cache"),
    ("host_blocks_used", "host_blocks_used", "Blocks of the host store in use"),
)
# "_total" is added by the format
_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of admitted requests, each request counted once"),
    ("generation_tokens", "generation_tokens", "Tokens generated"),
    ("prefix_query_tokens", "prefix_query_tokens", "Prompt tokens looked up in the prefix cache"),
    ("prefix_hit_tokens", "prefix_hit_tokens", "Prompt tokens found in the prefix cache"),
    ("recomputed_tokens", "recomputed_tokens", "Tokens computed again after a preemption"),
    ("steps", "steps", "Steps done"),
    ("step_tokens", "step_tokens", "Tokens computed by all steps"),
    ("compute_seconds", "compute_s", "Seconds spent in forward passes and in choosing tokens"),
)
_FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_HOST_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
_REQUEST_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)


class Histogram:
    """Observations counted in buckets; `bounds` are the upper edges, included, in rising order."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.text = text
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self._counts)

    @property
    def sum(self) -> float:
        """The sum of all observed values."""
        return self._sum

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self) -> HistogramMetricFamily:
        """The present state in the library's terms."""
        buckets, below = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(below)))
        return HistogramMetricFamily(self.name, self.text, buckets=buckets, sum_value=self._sum)


class Metrics(Collector):
    """All metrics of one server, in a registry of their own. `update` is the only writer of the engine's
    numbers.
    """

    def __init__(self) -> None:
        self.stats = EngineStats()
        self.first_token_s = Histogram(
            "octavo_time_to_first_token_seconds", "From arrival to the first token", _FIRST_TOKEN_S
        )
        self.token_gap_s = Histogram(
            "octavo_inter_token_latency_seconds", "Gap between two tokens of a sequence", _GAP_S
        )
        self.request_s = Histogram(
            "octavo_e2e_request_latency_seconds", "From arrival to the last token", _REQUEST_S
        )
        self.prompt_tokens = Histogram(
            "octavo_request_prompt_tokens", "Prompt tokens of a finished request", _TOKENS
        )
        self.generation_tokens = Histogram(
            "octavo_request_generation_tokens", "Tokens generated for a finished request", _TOKENS
        )
        self.host_s = Histogram(
            "octavo_step_host_seconds",
            "What a step takes outside the kernels: messages, schedule, commit",
            _HOST_S,
        )
        self.registry = CollectorRegistry()
        self.registry.register(self)

    def update(self, stats: EngineStats, host_s: float | None = None) -> None:
        """Take the latest numbers of the engine, and the host time of its last step. O(1): it keeps the reference."""
        self.stats = stats
        if host_s is not None:
            self.host_s.observe(host_s)

    def render(self) -> bytes:
        """The page, in the text format that `CONTENT_TYPE` names."""
        return generate_latest(self.registry)

    def collect(self) -> Iterable[Metric]:
        """Every family as it is now; called by the registry."""
        stats = self.stats
        for name, field, text in _GAUGES:
            yield GaugeMetricFamily(f"octavo_{name}", text, value=getattr(stats, field))
        for name, field, text in _COUNTERS:
            yield CounterMetricFamily(f"octavo_{name}", text, value=getattr(stats, field))
        preemptions = CounterMetricFamily(
            "octavo_preemptions", "Times a sequence lost blocks", labels=["kind"]
        )
        preemptions.add_metric(["recompute"], stats.preemptions_recompute)
        preemptions.add_metric(["swap"], stats.preemptions_swap)
        yield preemptions
        finished = CounterMetricFamily(
            "octavo_requests_finished", "Sequences ended, by reason", labels=["reason"]
        )
        for reason in dict.fromkeys((*FINISH_REASONS, *sorted(stats.finished))):
            finished.add_metric([reason], stats.finished.get(reason, 0))
        yield finished
        for histogram in (
            self.first_token_s,
            self.token_gap_s,
            self.request_s,
            self.prompt_tokens,
            self.generation_tokens,
            self.host_s,
        ):
            yield histogram.family()


class RequestTimer:
    """Follows one request from its arrival and fills the histograms.

    arrival_s: when the request came. All times come from the caller, from one monotonic clock.
    num_prompt_tokens: length of its prompt, counted once however many sequences it has.
    """

    def __init__(self, metrics: Metrics, arrival_s: float, num_prompt_tokens: int = 0) -> None:
        self._metrics = metrics
        self._arrival_s = arrival_s
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._last_s: dict[int, float] = {}
        self._ended = False

    def tokens(self, count: int, now: float, index: int = 0) -> None:
        """`count` new tokens of sequence `index` are handed out at `now`.

        Tokens that come together have no gap between them, so the sum of all gaps of a sequence is the time
        from its first to its last token, whatever the pieces.
        """
        if count < 1 or self._ended:
            return
        if not self._last_s:
            self._metrics.first_token_s.observe(max(0.0, now - self._arrival_s))
        last_s = self._last_s.get(index)
        if last_s is not None:
            self._metrics.token_gap_s.observe(max(0.0, now - last_s))
        if count > 1:
            self._metrics.token_gap_s.observe(0.0, count - 1)
        self._last_s[index] = now
        self._num_tokens += count

    def finished(self, reason: str, now: float) -> None:
        """The whole request has ended; a second call does nothing. Aborted and failed ones say nothing about
        speed.
        """
        if self._ended:
            return
        self._ended = True
        if reason in ("stop", "length"):
            self._metrics.request_s.observe(max(0.0, now - self._arrival_s))
            self._metrics.prompt_tokens.observe(self._num_prompt_tokens)
            self._metrics.generation_tokens.observe(self._num_tokens)
