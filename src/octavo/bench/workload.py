"""What a benchmark asks: requests of exact lengths, out of a JSONL file or made at random from a seed.

A line of a file is one request:

    {"id": "a", "prompt": "Once", "prompt_token_ids": [6403], "max_tokens": 8, "temperature": 0, "n": 1, "arrival_s": 0.7}

`prompt` or `prompt_token_ids` must be there; both may, and then they mean the same. `max_tokens` must be there too.
`arrival_s` is when the request arrives at a rate of one request a second. `extra_body` holds further fields of the
request body. Unknown fields are refused: a misspelt one would silently measure something else.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec

from octavo.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class WorkloadRequest:
    """One request of a workload. `arrival_s`: None if the workload does not say."""

    request_id: str
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    max_tokens: int
    temperature: float = 0.0
    n: int = 1
    arrival_s: float | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def prompt_to_send(self, *, send_text: bool) -> str | list[int]:
        """Token ids if there are any, unless text is asked for. Raises ConfigError if there is no text then."""
        if self.prompt_token_ids is not None and not send_text:
            return list(self.prompt_token_ids)
        if self.prompt is None:
            raise ConfigError(f"request {self.request_id} has token ids and no text; leave out --send-text")
        return self.prompt


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    max_tokens: Annotated[int, msgspec.Meta(ge=1)]
    id: str | int | None = None
    prompt: str | None = None
    prompt_token_ids: list[Annotated[int, msgspec.Meta(ge=0)]] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    n: Annotated[int, msgspec.Meta(ge=1)] = 1
    arrival_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    extra_body: dict[str, Any] = {}


def read_workload(file: Path, num_requests: int | None = None) -> list[WorkloadRequest]:
    """The requests of a JSONL file, or the first `num_requests` of them, in the order of the file.

    Raises ConfigError that names file and line for a line that cannot be used, and if there are too few.
    """
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read the workload {file}: {e}") from e
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if num_requests is not None and num_requests > len(numbered):
        raise ConfigError(f"{file} has {len(numbered)} requests, --num-requests asks for {num_requests}")
    requests = [_request(f"{file}:{number}", number, line) for number, line in numbered[:num_requests]]
    if not requests:
        raise ConfigError(f"the workload {file} is empty; write one JSON object a line")
    return requests


def random_workload(
    *,
    num_requests: int,
    input_len: int,
    output_len: int,
    shared_prefix_len: int = 0,
    vocab_size: int = 32000,
    seed: int = 0,
) -> list[WorkloadRequest]:
    """Prompts of `input_len` random token ids below `vocab_size`; the first `shared_prefix_len` are alike in all.

    The same arguments give the same requests. Raises ConfigError for lengths that do not fit each other.

    >>> a, b = random_workload(num_requests=2, input_len=4, output_len=1, shared_prefix_len=3)
    >>> a.prompt_token_ids[:3] == b.prompt_token_ids[:3]
    True
    """
    for flag, value in (
        ("--num-requests", num_requests),
        ("--input-len", input_len),
        ("--output-len", output_len),
    ):
        if value < 1:
            raise ConfigError(f"{flag} is {value}; it must be at least 1")
    if not 0 <= shared_prefix_len <= input_len:
        raise ConfigError(
            f"--shared-prefix-len is {shared_prefix_len}; it is part of --input-len, which is {input_len}"
        )
    if vocab_size < 1:
        raise ConfigError(f"--vocab-size is {vocab_size}; it must be at least 1")
    chance = random.Random(seed)
    prefix = tuple(chance.randrange(vocab_size) for _ in range(shared_prefix_len))
    return [
        WorkloadRequest(
            request_id=f"random-{i}",
            prompt_token_ids=(
                *prefix,
                *(chance.randrange(vocab_size) for _ in range(input_len - shared_prefix_len)),
            ),
            max_tokens=output_len,
        )
        for i in range(num_requests)
    ]


def warmup_requests(requests: list[WorkloadRequest], count: int) -> list[WorkloadRequest]:
    """`count` requests to send before anything is measured: prompts of the workload backwards, at most 16 new tokens.

    Backwards, because they are as long and as plausible as the real ones but leave no prefix of theirs in a cache.
    """
    return [
        WorkloadRequest(
            request_id=f"warmup-{i}",
            prompt=None if request.prompt is None else request.prompt[::-1],
            prompt_token_ids=None if request.prompt_token_ids is None else request.prompt_token_ids[::-1],
            max_tokens=min(request.max_tokens, 16),
        )
        for i, request in ((i, requests[i % len(requests)]) for i in range(count))
    ]


def _request(where: str, number: int, line: str) -> WorkloadRequest:
    try:
        fields = msgspec.json.decode(line, type=_Line)
    except msgspec.MsgspecError as e:
        raise ConfigError(
            f'{where}: {e}; a line is an object such as {{"prompt_token_ids": [1, 2], "max_tokens": 8}}'
        ) from e
    if not fields.prompt and not fields.prompt_token_ids:
        raise ConfigError(f"{where}: there is no prompt; give prompt or prompt_token_ids")
    return WorkloadRequest(
        request_id=f"line-{number}" if fields.id is None else str(fields.id),
        prompt=fields.prompt,
        prompt_token_ids=tuple(fields.prompt_token_ids) if fields.prompt_token_ids else None,
        max_tokens=fields.max_tokens,
        temperature=fields.temperature,
        n=fields.n,
        arrival_s=fields.arrival_s,
        extra_body=fields.extra_body,
    )
