"""Answers a workload with transformers' `generate`, batch after batch in file order, and says when each token was there.

Runs in the environment of the peer, which has no Octavo. Batches are padded on the left and go on until their longest answer
is done. What it writes on stdout, one JSON object (times in seconds since the run began):

    {"load_s": 3.2, "wall_s": 70.1,
     "requests": [{"id": "a", "num_prompt_tokens": 9, "began_s": 0.0, "times_s": [[0.2, 0.3]]}, ...]}

`began_s` is when its batch began; `times_s` has a list for each sequence. A request that was not begun or not finished
within the time limit has "error".
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.generation import StoppingCriteria


class _Clock(StoppingCriteria):
    """Notes the time of each step, which is when all sequences of the batch have one token more."""

    def __init__(self, began: float, limit_s: float) -> None:
        self.times: list[float] = []
        self._began = began
        self._limit_s = limit_s

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.times.append(time.perf_counter() - self._began)
        return torch.full((input_ids.shape[0],), self.times[-1] > self._limit_s)


@torch.inference_mode()
def answer(model: Any, batch: list[dict[str, Any]], clock: _Clock) -> None:
    longest = max(len(ask["prompt_token_ids"]) for ask in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, ask in enumerate(batch):
        prompt = torch.tensor(ask["prompt_token_ids"])
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    first = batch[0]
    sampling: dict[str, Any] = {"do_sample": False}
    if first.get("temperature", 0) > 0:
        sampling = {"do_sample": True, "temperature": first["temperature"], "top_k": 0, "top_p": 1.0}
    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max(ask["max_tokens"] for ask in batch),
        num_return_sequences=first.get("n", 1),
        pad_token_id=0,
        stopping_criteria=[clock],
        **sampling,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--time-limit-s", type=float, required=True)
    parser.add_argument("--num-requests", type=int)
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    began = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    asks = [json.loads(line) for line in options.workload.read_text().splitlines() if line.strip()]
    asks = asks[: options.num_requests]
    load_s = time.perf_counter() - began

    began = time.perf_counter()
    requests = []
    for start in range(0, len(asks), options.batch_size):
        batch = asks[start : start + options.batch_size]
        began_s = time.perf_counter() - began
        clock = _Clock(began, options.time_limit_s)
        if began_s < options.time_limit_s:
            answer(model, batch, clock)
        for ask in batch:
            times = clock.times[: ask["max_tokens"]]
            entry: dict[str, Any] = {"id": ask["id"], "began_s": began_s}
            entry["num_prompt_tokens"] = len(ask["prompt_token_ids"])
            entry["times_s"] = [times] * ask.get("n", 1)
            if len(times) < ask["max_tokens"]:
                entry["error"] = f"not finished within {options.time_limit_s:.0f} s"
            requests.append(entry)
    print(json.dumps({"load_s": load_s, "wall_s": time.perf_counter() - began, "requests": requests}))


if __name__ == "__main__":
    main()
