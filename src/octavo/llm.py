"""The offline API: a model in this process, prompts in, results out.

    from octavo import LLM, SamplingParams

    llm = LLM(model="smollm2-135m-instruct")
    for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
        print(output.outputs[0].text)

The same engine, scheduler and text handling as the server's, driven by a plain loop instead of a process and a socket.
"""

from __future__ import annotations

import itertools
import logging
import operator
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from octavo.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, gib_to_bytes
from octavo.engine.build import build_engine
from octavo.engine.messages import GenerateRequest, SequenceUpdate
from octavo.engine.progress import Progress
from octavo.engine.streams import RequestStream, with_special_stops
from octavo.errors import OctavoError, ValidationError
from octavo.outputs import CompletionOutput, RequestDelta, RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.scheduler.limits import check_request
from octavo.text.chat_template import render_chat
from octavo.text.tokenizer import Tokenizer
from octavo.weights.locate import DEFAULT_MODEL, default_served_name, locate_model
from octavo.weights.tokenizer_files import prepare_tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int] | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """A language model served from block-paged memory in this process. Not thread-safe.

    model: a name, a local Hugging Face folder or a .gguf file. The other arguments are those of `octavo serve`:
    dtype ("auto", "float32", ...), max_model_len and block_size in tokens, num_blocks or kv_cache_gb (GiB) for the pool,
    swap_gb (GiB) for the host store, max_num_seqs, max_num_batched_tokens (the token budget of a step), policy, preemption
    ("recompute" or "swap"), seed, num_threads, check (verify all invariants after each step).

    Raises ConfigError, ModelUnavailableError or ModelFileError, each saying what to do.

    >>> llm = LLM(model="smollm2-135m-instruct")                                       # doctest: +SKIP
    >>> llm.generate("1, 2, 3,", SamplingParams(temperature=0, max_tokens=2))[0].outputs[0].text  # doctest: +SKIP
    ' 4'
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        dtype: str = "auto",
        quantization: str = "none",
        weight_cache: bool = True,
        max_model_len: int | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        kv_cache_gb: float | None = None,
        swap_gb: float | None = None,
        enable_prefix_caching: bool = True,
        kv_cache_dtype: str = "auto",
        policy: str = "fcfs",
        preemption: str = "recompute",
        max_num_seqs: int = SchedulerConfig.max_num_seqs,
        max_num_batched_tokens: int = SchedulerConfig.max_num_batched_tokens,
        attention_backend: str = EngineConfig.attention_backend,
        isa: str = EngineConfig.isa,
        batch_invariant: bool = False,
        shared_prefix_attention: bool = True,
        num_threads: int | None = None,
        seed: int | None = None,
        check: bool = False,
    ) -> None:
        path = locate_model(model)
        self._open(
            EngineConfig(
                model=ModelConfig(
                    path=str(path),
                    name=default_served_name(model, path),
                    dtype=dtype,
                    quantization=quantization,
                    weight_cache=weight_cache,
                    max_model_len=max_model_len,
                ),
                cache=CacheConfig(
                    block_size=block_size,
                    num_blocks=num_blocks,
                    kv_cache_bytes=gib_to_bytes("kv_cache_gb", kv_cache_gb),
                    swap_bytes=gib_to_bytes("swap_gb", swap_gb),
                    prefix_caching=enable_prefix_caching,
                    kv_cache_dtype=kv_cache_dtype,
                ),
                scheduler=SchedulerConfig(
                    policy=policy,
                    preemption=preemption,
                    max_num_seqs=max_num_seqs,
                    max_num_batched_tokens=max_num_batched_tokens,
                ),
                attention_backend=attention_backend,
                isa=isa,
                batch_invariant=batch_invariant,
                shared_prefix_attention=shared_prefix_attention,
                num_threads=num_threads,
                seed=seed,
                check=check,
            )
        )

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLM:
        """Make one from a config that names a local path already."""
        llm = cls.__new__(cls)
        llm._open(config)
        return llm

    def _open(self, config: EngineConfig) -> None:
        self.tokenizer = Tokenizer(prepare_tokenizer(config.model.path))
        self.engine, self.facts = build_engine(config)
        if self.facts.note:
            logger.warning("%s", self.facts.note)
        self._ids = itertools.count()
        # Updates of each request under way that nobody has taken yet: whoever makes a step makes it for all.
        self._inboxes: dict[str, list[SequenceUpdate]] = {}

    # -- whole results

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Continue each prompt; results come in the order of the prompts.

        prompts: one, or a list of them; each a text, a list of token ids, or {"prompt": text} or
            {"prompt_token_ids": ids}. params: one for all, or one per prompt. progress: show a bar with tokens per second.
        Raises ValueError for anything that can never be served, before any of it runs.
        """
        try:
            asked = self._requests(_as_list(prompts), params)
        except ValidationError as e:
            raise ValueError(e.message) from e
        return self._run(asked, progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of them, each a list of {"role": ..., "content": ...}.

        template: options of the chat template: add_generation_prompt, continue_final_message. Without a limit in params,
        an answer may run to the end of the context. Raises ValueError as `generate` does.
        """
        single = not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if single else messages
        try:
            chats = [render_chat(self.tokenizer, conversation, **template) for conversation in conversations]
            prompts: list[Prompt] = [chat.token_ids for chat in chats]
            asked = self._requests(prompts, params or SamplingParams(max_tokens=None))
        except ValidationError as e:
            raise ValueError(e.message) from e
        outputs = self._run(asked, progress)
        for output, chat in zip(outputs, chats, strict=True):
            output.prompt = chat.text
        return outputs

    # -- streams

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestDelta]:
        """Yield the deltas of one prompt as they come. Closing the iterator frees its blocks at once."""
        try:
            ((_, request),) = self._requests([prompt], params)
        except ValidationError as e:
            raise ValueError(e.message) from e
        return self._stream(request)

    def stream_chat(
        self, messages: Conversation, params: SamplingParams | None = None, **template: Any
    ) -> Iterator[RequestDelta]:
        """`stream` for a conversation."""
        try:
            chat = render_chat(self.tokenizer, list(messages), **template)
        except ValidationError as e:
            raise ValueError(e.message) from e
        return self.stream(chat.token_ids, params or SamplingParams(max_tokens=None))

    # -- inside

    def _requests(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[tuple[str | None, GenerateRequest]]:
        """Check everything before anything runs; returns (prompt text or None, request) in order."""
        if params is None or isinstance(params, SamplingParams):
            each: Sequence[SamplingParams] = [params or SamplingParams()] * len(prompts)
        else:
            each = params
        if len(each) != len(prompts):
            raise ValidationError(
                f"{len(prompts)} prompts but {len(each)} params; give one for all or one for each"
            )
        return [self._request(prompt, chosen) for prompt, chosen in zip(prompts, each, strict=True)]

    def _request(self, prompt: Prompt, params: SamplingParams) -> tuple[str | None, GenerateRequest]:
        text, ids = self._prompt(prompt)
        if params.truncate_prompt_tokens is not None:
            ids = ids[-params.truncate_prompt_tokens :]
        request = GenerateRequest(f"offline-{next(self._ids)}", tuple(ids), params)
        request = with_special_stops(request, self.tokenizer)
        checked = check_request(ids, request.params, self.engine.scheduler.limits)
        return text, replace(request, params=checked)

    def _prompt(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        given: Any = prompt
        if isinstance(prompt, Mapping):
            given = prompt.get("prompt_token_ids", prompt.get("prompt", ""))
        if isinstance(given, str):
            return given, self.tokenizer.encode(given)
        try:
            return None, [operator.index(token_id) for token_id in given]
        except TypeError:
            raise ValidationError(
                f"a prompt is {type(given).__name__}, which is neither a text nor a list of token ids"
                if not isinstance(given, Iterable)
                else "a prompt has something among its token ids that is no integer; give a text or token ids"
            ) from None

    def _run(self, asked: list[tuple[str | None, GenerateRequest]], progress: bool) -> list[RequestOutput]:
        results = {
            request.request_id: _Collected(text, request, RequestStream(request, self.tokenizer))
            for text, request in asked
        }
        for _, request in asked:
            self._submit(request)
        unfinished = set(results)
        try:
            with Progress(len(results)) if progress else nullcontext() as bar:
                while unfinished:
                    for update in self._news(unfinished):
                        collected = results[update.request_id]
                        collected.take(update, self)
                        if bar is not None:
                            bar.tokens(len(update.token_ids))
                        if collected.stream.finished and update.request_id in unfinished:
                            unfinished.discard(update.request_id)
                            del self._inboxes[update.request_id]
                            if bar is not None:
                                bar.request_done()
        finally:
            for request_id in unfinished:
                self._abort(request_id)
        return [results[request.request_id].output for _, request in asked]

    def _stream(self, request: GenerateRequest) -> Iterator[RequestDelta]:
        stream = RequestStream(request, self.tokenizer)
        self._submit(request)
        try:
            while not stream.finished:
                for update in self._news([request.request_id]):
                    delta = self._delta(stream, update)
                    if delta is not None:
                        yield delta
        finally:
            self._abort(request.request_id)

    def _submit(self, request: GenerateRequest) -> None:
        self._inboxes[request.request_id] = self.engine.submit(request, time.monotonic())

    def _abort(self, request_id: str) -> None:
        self.engine.finish(request_id, None, "abort")
        self._inboxes.pop(request_id, None)

    def _news(self, request_ids: Iterable[str]) -> list[SequenceUpdate]:
        """What there is for these requests; makes a step if there is nothing. News of others wait for them."""
        asked = list(request_ids)
        if not any(self._inboxes[request_id] for request_id in asked):
            for update in self.engine.step(time.monotonic()):
                if update.request_id in self._inboxes:
                    self._inboxes[update.request_id].append(update)
        news = [update for request_id in asked for update in self._inboxes[request_id]]
        for request_id in asked:
            self._inboxes[request_id].clear()
        return news

    def _delta(self, stream: RequestStream, update: SequenceUpdate) -> RequestDelta | None:
        """The delta of an update; a sequence that a stop string ended is ended in the engine as well."""
        if update.error is not None:
            raise OctavoError(update.error, code="request_failed")
        delta = stream.feed(update)
        if delta is not None and delta.finish_reason is not None and update.finish_reason is None:
            self.engine.finish(update.request_id, update.index, "stop")
        return delta


class _Collected:
    """The result of one request while it grows."""

    def __init__(self, text: str | None, request: GenerateRequest, stream: RequestStream) -> None:
        self.stream = stream
        wants_logprobs = request.params.logprobs is not None
        self.output = RequestOutput(
            request_id=request.request_id,
            prompt=text,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[
                CompletionOutput(i, logprobs=[] if wants_logprobs else None) for i in range(request.params.n)
            ],
        )

    def take(self, update: SequenceUpdate, llm: LLM) -> None:
        delta = llm._delta(self.stream, update)
        if delta is None:
            return
        output = self.output.outputs[delta.index]
        output.text += delta.text
        output.token_ids.extend(delta.token_ids)
        if output.logprobs is not None:
            output.logprobs.extend(delta.logprobs or ())
        output.finish_reason = delta.finish_reason
        output.stop_reason = delta.stop_reason
        self.output.num_cached_tokens = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = list(delta.prompt_logprobs)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Any]:
    """One prompt or several? A list of integers is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [prompts]
    return prompts
