"""The offline API on a tiny model: order, one set of params per prompt, refusals before anything runs, streams."""

from __future__ import annotations

import pytest

from octavo import LLM, SamplingParams
from octavo.kernels import library
from served_model import tiny_served_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    return LLM(
        str(tiny_served_model(tmp_path_factory.mktemp("llm") / "tiny")),
        dtype="float32",
        num_blocks=512,
        num_threads=1,
        check=True,
    )


def test_a_fallback_to_plain_torch_is_said_once(tmp_path, monkeypatch, caplog):
    def load():
        raise ImportError("no compiler was there")

    monkeypatch.setattr(library, "load", load)
    LLM(str(tiny_served_model(tmp_path / "tiny")), dtype="float32", num_blocks=16, num_threads=1)
    said = [record.message for record in caplog.records if record.name == "octavo.llm"]
    assert len(said) == 1 and "no compiler was there" in said[0]


def test_results_come_in_the_order_of_the_prompts(llm):
    prompts = [f"Item {i}: " + "x " * (i * 7 % 50) for i in range(32)]
    params = [SamplingParams(temperature=0, max_tokens=1 + (i * 5) % 17, ignore_eos=True) for i in range(32)]
    outputs = llm.generate(prompts, params)
    assert [o.prompt for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [p.max_tokens for p in params]
    assert all(o.finished for o in outputs)


def test_as_many_params_as_prompts(llm):
    two = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (2, 5)]
    assert [len(o.outputs[0].token_ids) for o in llm.generate(["A", "B"], two)] == [2, 5]
    steps = llm.engine.stats().steps
    with pytest.raises(ValueError, match="3 prompts but 2 params"):
        llm.generate(["A", "B", "C"], two)
    assert llm.engine.stats().steps == steps


def test_token_ids_equal_their_text(llm):
    params = SamplingParams(max_tokens=8, temperature=0)
    text = llm.generate("Hello, my name is", params)[0]
    for prompt in ({"prompt_token_ids": [19556, 28, 957, 1462, 314]}, [19556, 28, 957, 1462, 314]):
        assert llm.generate(prompt, params)[0].outputs[0].token_ids == text.outputs[0].token_ids


@pytest.mark.parametrize(
    "bad",
    [
        {"prompt_token_ids": []},
        {"prompt_token_ids": [49152]},
        {"prompt_token_ids": [-1]},
        "",
        [[1.5]],
        [["a"]],
        [None],
    ],
)
def test_bad_prompts_raise_value_error_and_leave_the_engine_well(llm, bad):
    with pytest.raises(ValueError) as caught:
        llm.generate(bad, SamplingParams(max_tokens=1))
    assert type(caught.value) is ValueError
    assert len(llm.generate("Hi", SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1}, {"temperature": float("nan")}, {"top_p": 1.5}, {"top_k": -2}, {"max_tokens": -1}, {"n": 0},
        {"min_tokens": 9, "max_tokens": 3}, {"presence_penalty": 9}, {"repetition_penalty": 0}, {"stop": [""]},
        {"logprobs": -3}, {"logprobs": 21}, {"seed": 2**70}, {"logit_bias": {-1: 1}}, {"logit_bias": {1: 101}},
        {"stop_token_ids": list(range(257))}, {"min_p": 2},
        {"logit_bias": {1: 10**400}}, {"temperature": 10**400}, {"temperature": float("inf")}, {"stop": 5},
        {"logit_bias": [1]}, {"stop_token_ids": 5}, {"allowed_token_ids": "12"}, {"ignore_eos": "no"},
        {"repetition_penalty": 1e-40},
    ],
)  # fmt: skip
def test_bad_params_are_refused_when_made(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingParams(**bad)


def test_what_is_none_is_not_asked_for():
    params = SamplingParams(logit_bias=None, stop=None, stop_token_ids=None, allowed_token_ids=None)
    assert params == SamplingParams()


@pytest.mark.parametrize(
    "bad", [{"stop_token_ids": [49152]}, {"logit_bias": {49152: 1}}, {"allowed_token_ids": [99999]}]
)
def test_ids_outside_the_vocabulary_are_refused(llm, bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        llm.generate("Hi", SamplingParams(max_tokens=1, **bad))


def test_truncation_works_for_prompts_and_chats(llm):
    params = SamplingParams(max_tokens=1, temperature=0, truncate_prompt_tokens=10)
    assert (
        len(
            llm.generate("one two three four five six seven eight nine ten eleven twelve", params)[
                0
            ].prompt_token_ids
        )
        == 10
    )
    assert len(llm.chat([{"role": "user", "content": "word " * 9000}], params)[0].prompt_token_ids) == 10


def test_chat_takes_one_conversation_or_several(llm):
    hi, hello = [{"role": "user", "content": "Hi"}], [{"role": "user", "content": "Say hello."}]
    params = SamplingParams(max_tokens=1, temperature=0)
    (one,) = llm.chat(hi, params)
    assert len(one.prompt_token_ids) == 31 and one.prompt_token_ids[:2] == [1, 9690]
    assert [len(o.prompt_token_ids) for o in llm.chat([hi, hello], params)] == [31, 33]


def test_stream_equals_generate_and_closing_it_gives_everything_back(llm):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    whole = llm.generate("Hello", params)[0].outputs[0]
    deltas = list(llm.stream("Hello", params))
    assert "".join(d.text for d in deltas) == whole.text and deltas[-1].finish_reason == "length"
    stream = llm.stream("Hello", params)
    next(stream)
    assert llm.engine.scheduler.pool.num_used > 0
    stream.close()
    assert llm.engine.scheduler.pool.num_used == 0


def test_streams_side_by_side_do_not_take_each_others_news(llm):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = ["Hello", "Once upon a time"]
    alone = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in prompts]
    pairs = list(zip(*(llm.stream(prompt, params) for prompt in prompts), strict=True))
    assert [[t for pair in pairs for t in pair[i].token_ids] for i in (0, 1)] == alone
    open_stream = llm.stream(prompts[0], params)
    first = next(open_stream)
    assert llm.generate(prompts[1], params)[0].outputs[0].token_ids == alone[1]
    assert [*first.token_ids, *(t for delta in open_stream for t in delta.token_ids)] == alone[0]
    assert llm.engine.scheduler.pool.num_used == 0 and not llm._inboxes


def test_stop_string_ends_the_sequence_in_the_engine_as_well(llm):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    text = llm.generate("Hello", params)[0].outputs[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    from dataclasses import replace

    stopped = llm.generate("Hello", replace(params, stop=[stop]))[0].outputs[0]
    assert stopped.text == text.split(stop)[0]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert llm.engine.scheduler.pool.num_used == 0


def test_nothing_stops_before_min_tokens(llm):
    params = SamplingParams(
        temperature=0, max_tokens=12, min_tokens=8, logit_bias={2: 100}, stop=["e", "a", "o", " "]
    )
    output = llm.generate("Hello", params)[0].outputs[0]
    assert len(output.token_ids) >= 8 and 2 not in output.token_ids[:7]


def test_scoring_only(llm):
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    output = llm.generate("Your answer: Yes", params)[0]
    assert output.outputs[0].token_ids == [] and output.outputs[0].finish_reason == "length"
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids) and output.prompt_logprobs[0] is None
