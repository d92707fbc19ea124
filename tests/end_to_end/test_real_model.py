"""The real model behind a real server: known answers, the official client, server equal to offline."""

from __future__ import annotations

import itertools

import openai
import pytest
import torch

from octavo import LLM, SamplingParams
from served_model import real_model, reference_smollm2

PROMPTS = ["The capital of France is", "Once upon a time", "def add(a, b):", "1, 2, 3,"]


@pytest.fixture(scope="module")
def client(real_server):
    return openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def llm():
    return LLM(str(real_model()), dtype="float32", kv_cache_gb=0.25)


def test_official_client(client):
    model = client.models.list().data[0].id
    assert model == "smollm2"
    plain = client.completions.create(model=model, prompt="Hello, my name is", max_tokens=5, temperature=0)
    assert plain.usage.total_tokens == 10 and plain.choices[0].finish_reason == "length"
    messages = [{"role": "user", "content": "Say hello."}]
    ask = {"model": model, "messages": messages, "max_tokens": 6, "temperature": 0}
    chat = client.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    assert len(chat.choices[0].logprobs.content) == chat.usage.completion_tokens == 6
    parts = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    text = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    assert text == chat.choices[0].message.content
    assert parts[-1].choices == [] and parts[-1].usage.completion_tokens == 6
    for wrong, error in (
        ({"model": "nope"}, openai.NotFoundError),
        ({"model": model, "temperature": -1}, openai.BadRequestError),
        ({"model": model, "max_tokens": -5}, openai.BadRequestError),
    ):
        with pytest.raises(error) as caught:
            client.completions.create(prompt="Hi", **wrong)
        assert caught.value.body["message"]


def test_cached_tokens_are_exact(client):
    ask = {"model": "smollm2", "max_tokens": 30, "temperature": 0, "extra_body": {"ignore_eos": True}}
    prompt = list(range(1000, 1061))
    first = client.completions.create(prompt=prompt, **ask)
    again = client.completions.create(prompt=prompt, **ask)
    branch = client.completions.create(prompt=[*prompt[:41], 7, 8, 9], **ask)
    cached = [r.usage.prompt_tokens_details.cached_tokens for r in (first, again, branch)]
    assert cached == [0, 60, 41]
    assert first.choices[0].text == again.choices[0].text


def test_server_equals_offline(client, llm):
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    offline = llm.generate(PROMPTS, params)
    ask = {"model": "smollm2", "max_tokens": 24, "temperature": 0, "extra_body": {"ignore_eos": True}}
    served = client.completions.create(prompt=PROMPTS, **ask)
    assert [c.text for c in served.choices] == [o.outputs[0].text for o in offline]
    seeded = SamplingParams(temperature=1, seed=5, n=2, max_tokens=12)
    offline = llm.generate(PROMPTS[0], seeded)[0]
    ask = {"model": "smollm2", "max_tokens": 12, "temperature": 1, "seed": 5, "n": 2}
    served = client.completions.create(prompt=PROMPTS[0], **ask)
    assert [c.text for c in served.choices] == [o.text for o in offline.outputs]


def test_chat_is_rendered_alike_and_ends_by_itself(client, llm):
    messages = [{"role": "user", "content": "Say hello."}]
    offline = llm.chat(messages, SamplingParams(temperature=0, max_tokens=120))[0]
    served = client.chat.completions.create(model="smollm2", messages=messages, temperature=0, max_tokens=120)
    assert offline.outputs[0].text == served.choices[0].message.content
    assert served.choices[0].finish_reason == "stop" and "<|" not in offline.outputs[0].text
    assert len(offline.prompt_token_ids) == served.usage.prompt_tokens == 33
    assert llm.chat([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=1))[0].prompt_token_ids[
        :2
    ] == [1, 9690]


def test_answers_do_not_move_on_the_real_model(llm):
    """Alone, in a batch of 32, warm, in other blocks and chunks, and under forced preemption of both kinds."""
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    prompts = [f"{PROMPTS[i % 4]} {'word ' * (i * 3 % 20)}" for i in range(32)]
    alone = [llm.generate(p, params)[0].outputs[0].token_ids for p in prompts]
    assert [o.outputs[0].token_ids for o in llm.generate(prompts, params)] == alone
    for options in (
        {"enable_prefix_caching": False, "block_size": 1},
        {"block_size": 4, "max_num_batched_tokens": 16},
        {"block_size": 4, "max_num_batched_tokens": 64, "preemption": "swap"},
        {"block_size": 64, "max_num_batched_tokens": 2048},
    ):
        other = LLM(
            str(real_model()), dtype="float32", kv_cache_gb=0.2, check=options["block_size"] > 1, **options
        )
        if options["block_size"] == 4:
            preempt_all_every_third_step(other)
        assert [o.outputs[0].token_ids for o in other.generate(prompts, params)] == alone, options
        if options["block_size"] == 4:
            stats = other.engine.stats()
            assert (stats.preemptions_swap if "preemption" in options else stats.preemptions_recompute) > 32


def preempt_all_every_third_step(llm: LLM) -> None:
    scheduler, steps = llm.engine.scheduler, itertools.count(1)
    schedule = scheduler.schedule

    def preempting_schedule(now: float):
        if next(steps) % 3 == 0:
            for sequence in scheduler.running:
                scheduler.preempt(sequence.request.request_id)
        return schedule(now)

    scheduler.schedule = preempting_schedule


def test_matches_transformers(llm):
    reference = reference_smollm2()
    reference.generation_config.eos_token_id = None
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, prompt_logprobs=0)
    same = 0
    for output in llm.generate(PROMPTS, params):
        ids = torch.tensor([output.prompt_token_ids])
        whole = reference.generate(ids, max_new_tokens=32, do_sample=False, pad_token_id=2)[0, ids.shape[1] :]
        same += whole.tolist() == output.outputs[0].token_ids
        with torch.inference_mode():
            scores = torch.log_softmax(reference(ids).logits[0].double(), dim=-1)
        expected = [scores[i, t].item() for i, t in enumerate(output.prompt_token_ids[1:])]
        assert output.prompt_logprobs[0] is None
        assert [next(iter(p.values())) for p in output.prompt_logprobs[1:]] == pytest.approx(
            expected, abs=1e-3
        )
    assert same == len(PROMPTS)
