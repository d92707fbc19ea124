"""What each way to keep weights and KV costs in accuracy: perplexity on one text, against plain torch in float32.

    python benchmarks/perplexity.py [--model NAME] [--text FILE] [--only NAME ...]

The text (tests/data/perplexity.txt, written for this purpose) is cut into windows of 512 tokens; every token of a window but
the first is scored after those before it, through `prompt_logprobs` of the offline API, which is how a user would do it.

Change is that of the perplexity, in percent. Behind ± stands its standard error: both score the same tokens, so it is that
of the mean difference. Agreement: at how many positions the likeliest next token is the reference's.
"""

from __future__ import annotations

import argparse
import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from octavo import LLM, SamplingParams
from octavo.config import CacheConfig, EngineConfig, ModelConfig
from octavo.weights.locate import DEFAULT_MODEL, locate_model

TEXT = Path(__file__).parent.parent / "tests" / "data" / "perplexity.txt"
WINDOW = 512


@dataclass(frozen=True)
class Way:
    """One way to compute. dtype: of activations, and of weights that are not quantised."""

    name: str
    backend: str
    dtype: str
    quantization: str = "none"
    kv_cache_dtype: str = "auto"


REFERENCE = Way("reference float32", "reference", "float32")
_NATIVE = (
    ("float32", "none"),
    ("bfloat16", "none"),
    ("bfloat16", "int8"),
    ("bfloat16", "int4"),
    ("bfloat16", "native"),
)
WAYS = tuple(
    Way(
        f"{dtype if quantization == 'none' else quantization}{', KV int8' if kv == 'int8' else ''}",
        "cpu",
        dtype,
        quantization,
        kv,
    )
    for dtype, quantization in _NATIVE
    for kv in ("auto", "int8")
)


@dataclass(frozen=True)
class Scores:
    """Of each scored token: minus its log probability, and the likeliest token in its place."""

    losses: list[float]
    likeliest: list[int]
    weight_bytes: int
    kv_token_bytes: float

    @property
    def perplexity(self) -> float:
        return math.exp(statistics.fmean(self.losses))


def score(way: Way, model: str, text: str, *, most_tokens: int | None = None) -> Scores:
    """Score a text, or its first so many tokens."""
    llm = LLM.from_config(
        EngineConfig(
            model=ModelConfig(
                path=str(locate_model(model)),
                dtype=way.dtype,
                quantization=way.quantization,
                weight_cache=False,
            ),
            cache=CacheConfig(num_blocks=4 * WINDOW // 16, block_size=16, kv_cache_dtype=way.kv_cache_dtype),
            attention_backend=way.backend,
        )
    )
    token_ids = llm.tokenizer.encode(text)[:most_tokens]
    windows = [token_ids[at : at + WINDOW] for at in range(0, len(token_ids) - 1, WINDOW)]
    losses: list[float] = []
    likeliest: list[int] = []
    for output in llm.generate(windows, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)):
        for token_id, found in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
            losses.append(-found[token_id])
            # The token itself comes first; the likeliest follows if it is another.
            likeliest.append(max(found, key=lambda each: (found[each], -each)))
    return Scores(losses, likeliest, llm.facts.weight_bytes, llm.facts.block_bytes / llm.facts.block_size)


def change(scores: Scores, reference: Scores) -> tuple[float, float]:
    """Change of the perplexity as a ratio, and its standard error."""
    differences = [a - b for a, b in zip(scores.losses, reference.losses, strict=True)]
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    return math.expm1(statistics.fmean(differences)), error


def agreement(scores: Scores, reference: Scores) -> float:
    """At how many positions the likeliest token is the same, from 0 to 1."""
    return statistics.fmean(a == b for a, b in zip(scores.likeliest, reference.likeliest, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--only", nargs="*", help="names of ways, as the table has them")
    options = parser.parse_args()
    text = options.text.read_text()
    reference = score(REFERENCE, options.model, text)
    print(f"{len(reference.losses):,} tokens scored\n")
    print("| way | weights MiB | KV bytes a token | mean loss | perplexity | change % | agreement % |")
    print("|---|---|---|---|---|---|---|")
    for way in (REFERENCE, *WAYS):
        if options.only and way.name not in options.only:
            continue
        scores = reference if way is REFERENCE else score(way, options.model, text)
        ratio, error = change(scores, reference)
        print(
            f"| {way.name} | {scores.weight_bytes / 2**20:.0f} | {scores.kv_token_bytes:,.0f}"
            f" | {statistics.fmean(scores.losses):.5f} | {scores.perplexity:.3f}"
            f" | {100 * ratio:+.2f} ± {100 * error:.2f} | {100 * agreement(scores, reference):.1f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
