"""Greedy tokens equal transformers' `generate` on a tiny random model of every supported kind."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_driver import make_engine, run
from octavo.sampling_params import SamplingParams
from tiny_models import KINDS, VOCAB_SIZE, tiny_model

NEW_TOKENS = 24


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_generate(kind, tmp_path):
    folder = tiny_model(kind, tmp_path / kind)
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (1, 9, 40)]
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    ours = {}
    for backend in ("reference", "cpu"):
        engine = make_engine(folder, block_size=4, max_num_batched_tokens=16, attention_backend=backend)
        ours[backend] = [answer.token_ids for answer in run(engine, prompts, params)]

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    reference.generation_config.eos_token_id = None
    assert ours["reference"] == ours["cpu"]
    for prompt, tokens in zip(prompts, ours["cpu"], strict=True):
        whole = reference.generate(
            torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        assert whole[0, len(prompt) :].tolist() == tokens
