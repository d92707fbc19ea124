"""Prompts for `octavo generate` out of a file, and its answers as JSONL.

A file named *.jsonl (or read from stdin when its first line begins with a brace) has one object a line:

    {"prompt": "Once upon", "max_tokens": 8, "id": "a"}      any field of SamplingParams may stand beside the prompt
    {"prompt_token_ids": [19556, 28], "temperature": 0.5}    `id` is repeated in the answer

Any other file holds one prompt a line; empty lines are skipped.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, ValidationError
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams

_SAMPLING_FIELDS = frozenset(field.name for field in dataclasses.fields(SamplingParams))
_OTHER_FIELDS = ("prompt", "prompt_token_ids", "id")


@dataclass(frozen=True)
class PromptLine:
    """One thing to complete: a text or token ids, with its own parameters and the id its line gave."""

    prompt: str | list[int]
    params: SamplingParams
    id: Any = None

    @property
    def for_llm(self) -> str | dict[str, list[int]]:
        """As the offline API takes prompts."""
        return self.prompt if isinstance(self.prompt, str) else {"prompt_token_ids": self.prompt}


def read_prompts(file: Path, defaults: SamplingParams) -> list[PromptLine]:
    """All prompts of a file ("-": stdin). Raises ConfigError naming the line at fault."""
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"cannot read prompts from {file}: {e}") from e
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    is_json = file.suffix == ".jsonl" or (str(file) == "-" and text.lstrip().startswith("{"))
    if not is_json:
        return [PromptLine(line.removesuffix("\r"), defaults) for _, line in lines]
    return [_json_prompt(f"{file}:{number}", line, defaults) for number, line in lines]


def json_answers(lines: Iterable[PromptLine], outputs: Iterable[RequestOutput]) -> Iterator[str]:
    """One JSON object for each prompt, in order, without line ends."""
    for line, output in zip(lines, outputs, strict=True):
        head = {} if line.id is None else {"id": line.id}
        prompt = {"prompt" if isinstance(line.prompt, str) else "prompt_token_ids": line.prompt}
        answers = [
            {
                "index": sequence.index,
                "text": sequence.text,
                "token_ids": list(sequence.token_ids),
                "finish_reason": sequence.finish_reason,
                "stop_reason": sequence.stop_reason,
            }
            for sequence in output.outputs
        ]
        counts = {
            "num_prompt_tokens": len(output.prompt_token_ids),
            "num_cached_tokens": output.num_cached_tokens,
        }
        yield json.dumps({**head, **prompt, "outputs": answers, **counts}, ensure_ascii=False)


def _json_prompt(where: str, line: str, defaults: SamplingParams) -> PromptLine:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{where}: not JSON: {e}") from e
    if not isinstance(fields, dict):
        raise ConfigError(f'{where}: a line must be an object such as {{"prompt": "..."}}')
    unknown = sorted(fields.keys() - _SAMPLING_FIELDS - set(_OTHER_FIELDS))
    if unknown:
        raise ConfigError(f"{where}: unknown field {unknown[0]!r}; use prompt and fields of SamplingParams")
    prompt = _prompt_of(where, fields)
    own = {name: fields[name] for name in fields.keys() & _SAMPLING_FIELDS}
    try:
        if own.get("logit_bias"):
            own["logit_bias"] = {int(token): bias for token, bias in own["logit_bias"].items()}
        params = dataclasses.replace(defaults, **own)
    except ValidationError as e:
        raise ConfigError(f"{where}: {e.message}") from e
    except (TypeError, ValueError, AttributeError) as e:
        raise ConfigError(f"{where}: a sampling field has a value of the wrong kind: {e}") from e
    return PromptLine(prompt, params, fields.get("id"))


def _prompt_of(where: str, fields: dict[str, Any]) -> str | list[int]:
    if ("prompt" in fields) == ("prompt_token_ids" in fields):
        raise ConfigError(f"{where}: give either prompt or prompt_token_ids")
    if "prompt" in fields:
        text = fields["prompt"]
        if isinstance(text, str):
            return text
        raise ConfigError(f"{where}: prompt is {text!r}; it must be a string")
    ids = fields["prompt_token_ids"]
    if isinstance(ids, list) and all(type(token) is int for token in ids):
        return ids
    raise ConfigError(f"{where}: prompt_token_ids must be a list of integers")
