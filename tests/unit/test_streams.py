"""From the engine's updates to deltas: stop strings, hidden stop tokens, held-back text, several sequences."""

from __future__ import annotations

import pytest

from octavo.engine.messages import GenerateRequest, SequenceUpdate
from octavo.engine.streams import RequestStream, with_special_stops
from octavo.sampling_params import SamplingParams
from octavo.text.tokenizer import Tokenizer
from octavo.weights.tokenizer_files import prepare_tokenizer
from served_model import real_model

END = 2


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(prepare_tokenizer(real_model()))


def play(tokenizer, text, finish="length", stop_reason=None, end=(), **params):
    """Feed the tokens of `text` one update each; returns the deltas."""
    request = with_special_stops(
        GenerateRequest("r", (5,), SamplingParams(**{"max_tokens": 99, **params})), tokenizer
    )
    stream = RequestStream(request, tokenizer)
    tokens = [*tokenizer.encode(text), *end]
    deltas = []
    for i, token in enumerate(tokens):
        last = i == len(tokens) - 1
        update = SequenceUpdate(
            "r",
            0,
            (token,),
            finish_reason=finish if last else None,
            stop_reason=stop_reason if last else None,
        )
        delta = stream.feed(update)
        if delta is not None:
            deltas.append(delta)
    assert stream.finished
    return deltas


def joined(deltas):
    return "".join(d.text for d in deltas)


def test_a_length_end_flushes_what_was_held_back_and_has_no_stop_reason(tokenizer):
    deltas = play(tokenizer, "one STO", stop=["STOP"])
    assert joined(deltas) == "one STO"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("length", None)


def test_a_stop_string_ends_the_text_and_later_news_is_ignored(tokenizer):
    deltas = play(tokenizer, "one STOP two three", stop=["STOP"])
    assert joined(deltas) == "one "
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "STOP")


def test_the_stop_string_is_shown_if_asked_for(tokenizer):
    assert (
        joined(play(tokenizer, "one STOP two", stop=["STOP"], include_stop_str_in_output=True)) == "one STOP"
    )


def test_an_end_token_is_hidden_also_if_special_tokens_are_shown(tokenizer):
    for skip in (True, False):
        deltas = play(tokenizer, "bye", finish="stop", end=(END,), skip_special_tokens=skip)
        assert joined(deltas) == "bye" and deltas[-1].token_ids == (END,)


def test_an_ordinary_stop_token_is_hidden(tokenizer):
    yes = tokenizer.encode(" yes")[0]
    deltas = play(tokenizer, "well", finish="stop", stop_reason=yes, end=(yes,), stop_token_ids=[yes])
    assert joined(deltas) == "well" and deltas[-1].stop_reason == yes


def test_a_special_token_named_as_stop_string_becomes_a_stop_token(tokenizer):
    request = with_special_stops(
        GenerateRequest("r", (5,), SamplingParams(stop=["<|im_end|>", "x"])), tokenizer
    )
    assert request.params.stop_token_ids == (END,)
    deltas = play(tokenizer, "hi", finish="stop", stop_reason=END, end=(END,), stop=["<|im_end|>"])
    assert (joined(deltas), deltas[-1].stop_reason) == ("hi", "<|im_end|>")


def test_text_before_min_tokens_stops_nothing(tokenizer):
    deltas = play(tokenizer, "a STOP b STOP c", stop=["STOP"], min_tokens=4)
    assert joined(deltas) == "a STOP b "


def test_half_a_character_waits_for_its_other_half(tokenizer):
    text = "x 👩‍🚀 y"
    deltas = play(tokenizer, text)
    assert joined(deltas) == text and all("\ufffd" not in d.text for d in deltas)


def test_prompt_logprobs_come_once_with_a_null_first(tokenizer):
    request = GenerateRequest("r", (5, 6), SamplingParams(n=2, prompt_logprobs=0))
    stream = RequestStream(request, tokenizer)
    first = stream.feed(SequenceUpdate("r", 0, (7,), prompt_logprobs=({6: -1.0},)))
    assert first.prompt_logprobs == (None, {6: -1.0})
    assert stream.feed(SequenceUpdate("r", 1, (7,))).prompt_logprobs is None
