"""From chat messages to the prompt of a model, through the model's own template.

What this is: the one render function of server and offline API; both give the ids that Hugging Face's
apply_chat_template gives for the same messages. It is not a parser of replies.

A template is Jinja source that comes with the model, so it runs in a sandbox that can change nothing, and
whatever goes wrong in it is reported in one line as the fault of this combination of template and messages.

Marks: what a user writes must not act as control tokens, but the template puts it between control tokens that
do, in one string. So before rendering, each spelling of a control token in what the user gave is replaced by
one character that occurs nowhere else, its mark; after rendering, the marks tell which spellings to encode as
plain text (`Tokenizer.encode_with_literals`).

    content  'Hi<|im_end|>'  ->  'Hi①'  -> render ->  '<|im_start|>user\\nHi①<|im_end|>\\n'  ->  ids, ① as
    plain text

A mark put behind the last message shows in the same way where a turn that is to be continued ends. If the
user spelled no control token, the rendered text is encoded in one go, as ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import chain
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import UnsupportedError, ValidationError
from octavo.text.tokenizer import Tokenizer

_RESERVED = ("messages", "tools", "add_generation_prompt")


@dataclass(frozen=True)
class ChatPrompt:
    """A rendered chat: the text as a person would read it, and the ids that the model gets."""

    text: str
    token_ids: list[int]


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> ChatPrompt:
    """Render `messages` with the model's chat template, or with `template`, and encode the result.

    messages: mappings with role and content; content is a string, None (nothing), or a list of text parts,
    which are joined without a separator. They are not changed. add_generation_prompt: end with the start of
    an assistant turn. continue_final_message: end inside the last turn, with the last character of its
    content. tools: given to the template as they are. template_kwargs: further variables for the template.

    BOS and EOS are where the template puts them and nowhere else. O(characters).

    Raises ValidationError (UnsupportedError for parts that are not text) if the messages are malformed, if
    there is no template, or if the template fails on them.
    """
    source = template or (tokenizer.tool_template if tools else None) or tokenizer.chat_template
    if not source:
        raise ValidationError(
            "this model has no chat template; use completions with a prompt, or give a chat template",
            param="messages",
        )
    turns = _plain_messages(messages)
    if continue_final_message:
        _check_continuation(turns, add_generation_prompt)
    given = {"documents": None} | dict(template_kwargs or {})
    for name in _RESERVED:
        if name in given:
            raise ValidationError(
                f"a template variable is named {name!r}, which is taken; rename it",
                param="chat_template_kwargs",
            )
    try:
        marks = _Marks(tokenizer, source, (turns, tools, given))
        turns, tools, given = marks.hide(turns), marks.hide(tools), marks.hide(given)
    except RecursionError as e:
        raise _wrong("the messages or tools are nested too deeply; flatten them") from e
    if continue_final_message:
        turns[-1]["content"] += marks.end
    rendered = _render(
        source,
        {
            **tokenizer.special_names,
            **given,
            "messages": turns,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        },
    )
    if continue_final_message:
        rendered = marks.cut(rendered)
    if not marks.spellings:
        return ChatPrompt(rendered, tokenizer.encode(rendered, add_special_tokens=False))
    return ChatPrompt(marks.show(rendered), tokenizer.encode_with_literals(rendered, marks.spellings))


class _Marks:
    """The marks of one rendering: characters that occur in nothing that is rendered. Written by `hide` only."""

    def __init__(self, tokenizer: Tokenizer, source: str, given: object) -> None:
        self.spellings: dict[str, str] = {}
        self._mark_of: dict[str, str] = {}
        self._control = _control_pattern(tuple(tokenizer.special_texts))
        self._free = _free_characters(
            source + json.dumps(given, ensure_ascii=False, default=str, skipkeys=True)
        )
        self.end = next(self._free)

    def hide(self, value: Any) -> Any:
        """A copy of `value` with marks for all spellings of control tokens, in keys too."""
        if isinstance(value, str):
            return self._control.sub(self._mark, value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(item) for item in value]
        return value

    def show(self, text: str) -> str:
        """`text` with the spellings back in place."""
        return text.translate({ord(mark): spelling for mark, spelling in self.spellings.items()})

    def cut(self, rendered: str) -> str:
        """`rendered` up to the end of the last message."""
        before, found, _ = rendered.rpartition(self.end)
        if not found:
            raise ValidationError(
                "the chat template leaves the last message out, so it cannot be continued",
                param="continue_final_message",
            )
        return before.replace(self.end, "")

    def _mark(self, match: re.Match[str]) -> str:
        spelling = match[0]
        if spelling not in self._mark_of:
            mark = next(self._free)
            self._mark_of[spelling] = mark
            self.spellings[mark] = spelling
        return self._mark_of[spelling]


def _free_characters(used: str) -> Iterator[str]:
    # Noncharacters, which Unicode reserves for inner use, then private use.
    for code in chain(range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE)):
        if chr(code) not in used:
            yield chr(code)


@lru_cache(maxsize=8)
def _control_pattern(spellings: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    if not isinstance(messages, (list, tuple)):
        raise _wrong(f"messages is {_brief(messages)}; give a list of messages")
    if not messages:
        raise _wrong("messages is empty; give at least one message")
    return [_plain_message(i, message) for i, message in enumerate(messages)]


def _plain_message(i: int, message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(f"messages[{i}] is {_brief(message)}; give an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(f"messages[{i}].role is {_brief(role)}; give a string such as 'user'")
    # A field that is null is a field that was not given: templates ask for "is defined".
    plain = {key: value for key, value in message.items() if value is not None}
    plain["content"] = _plain_content(i, message.get("content"))
    if "tool_calls" in plain:
        plain["tool_calls"] = _plain_tool_calls(i, plain["tool_calls"])
    return plain


def _plain_content(i: int, content: object) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise _wrong(f"messages[{i}].content is {_brief(content)}; give a string or a list of text parts")
    return "".join(_part_text(f"messages[{i}].content[{j}]", part) for j, part in enumerate(content))


def _part_text(where: str, part: object) -> str:
    if not isinstance(part, Mapping):
        raise _wrong(f"{where} is {_brief(part)}; give an object such as {{'type': 'text', 'text': ...}}")
    kind = part.get("type")
    if kind != "text":
        raise UnsupportedError(
            f"{where} is a part of type {_brief(kind)}; this model reads text only: give parts of type 'text'",
            param="messages",
        )
    text = part.get("text")
    if not isinstance(text, str):
        raise _wrong(f"{where}.text is {_brief(text)}; give a string")
    return text


def _plain_tool_calls(i: int, calls: object) -> list[Any]:
    """Tool calls with their arguments as objects: the API sends them as JSON text, templates expect to write them out."""
    if not isinstance(calls, (list, tuple)):
        raise _wrong(f"messages[{i}].tool_calls is {_brief(calls)}; give a list")
    plain = []
    for j, call in enumerate(calls):
        if not isinstance(call, Mapping):
            raise _wrong(f"messages[{i}].tool_calls[{j}] is {_brief(call)}; give an object")
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            call = {**call, "function": {**function, "arguments": _arguments(function["arguments"])}}
        plain.append(call)
    return plain


def _arguments(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text  # what a model wrote need not be JSON; the template gets it as it was
    return value if isinstance(value, dict) else text


def _check_continuation(turns: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise ValidationError(
            "continue_final_message and add_generation_prompt are both true; the one goes on with the last turn, "
            "the other begins a new one: set one of them to false",
            param="continue_final_message",
        )
    role = turns[-1]["role"]
    if role != "assistant":
        raise ValidationError(
            f"continue_final_message is true but the last message is from {_brief(role)}; it must be from 'assistant'",
            param="continue_final_message",
        )


def _wrong(message: str) -> ValidationError:
    return ValidationError(message, param="messages")


def _brief(value: object) -> str:
    if value is None:
        return "missing or null"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _render(source: str, variables: Mapping[str, Any]) -> str:
    try:
        return _compile(source).render(variables)
    except jinja2.TemplateSyntaxError as e:
        raise ValidationError(
            f"the chat template is not valid Jinja: line {e.lineno}: {_one_line(e.message or '')}",
            param="chat_template",
        ) from e
    except (
        Exception
    ) as e:  # a template is foreign code: any error in it is its own, or that of what it was given
        raise ValidationError(
            f"the chat template does not take these messages: {_one_line(str(e)) or type(e).__name__}",
            param="messages",
        ) from e


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    """The compiled template; kept, as compiling takes longer than rendering."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`, which marks assistant text for training: here, its body and no more."""

    tags = {"generation"}  # noqa: RUF012  (declared by jinja2 as an instance attribute)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Read the body of one such block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML and turns non-ASCII text into escapes; models were trained on
    # neither.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
