"""Chat messages to a prompt, through the template that a checkpoint brings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jinja2

from headrace.errors import UserError
from headrace.text import settings as checkpoint
from headrace.text.sandbox import Refusal, Sandbox
from headrace.text.tokenizer import Source

Message = Mapping[str, Any]

Accepted = Literal["text", "parts", "both"]

_ROLES = ("system", "developer", "user", "assistant", "tool")
_RESERVED = ("messages", "tools", "add_generation_prompt")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_TEXT_PARTS = {"text": "text", "refusal": "refusal"}
_PROBE = "headrace-probe"


class InvalidChat(UserError):
    """The messages cannot become a prompt: the template refused them, or they hold what is not served."""


class ChatTemplate:
    """A compiled template: the default one, and others by name (`tool_use` is taken where tools are given)."""

    def __init__(
        self,
        templates: Mapping[str, str],
        variables: Mapping[str, str],
        *,
        origin: str,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`variables` are the named special tokens; `origin` is what to call the template in errors."""
        self._sandbox = Sandbox(now)
        self._variables = dict(variables)
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in templates.items():
            try:
                self._templates[name] = self._sandbox.prepare(source)
            except jinja2.TemplateSyntaxError as error:
                raise UserError(
                    f"{origin}: the chat template is broken at line {error.lineno}: {error.message}"
                ) from None
            except (RecursionError, ValueError, SyntaxError, MemoryError, OverflowError) as error:
                raise UserError(f"{origin}: the chat template cannot be compiled: {_one_line(error)}") from None
        if "default" not in self._templates:
            raise UserError(f"{origin}: no chat template is named 'default'")
        self._content = {role: self._accepted_content(role) for role in _ROLES}

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt. Messages and tools as OpenAI's API has them; `kwargs` are more variables for the template.

        Raises InvalidChat, with the template's own words where it refuses the messages.
        """
        reserved = [name for name in kwargs if name in _RESERVED]
        if reserved:
            raise InvalidChat(f"chat_template_kwargs: {reserved[0]} is not for the template's keywords")
        prepared = [_message(f"messages[{i}]", message, self._content) for i, message in enumerate(messages)]
        own = {"messages": prepared, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        return self._run({**kwargs, **own})

    def _run(self, variables: Mapping[str, Any]) -> str:
        name = "tool_use" if variables["tools"] and "tool_use" in self._templates else "default"
        variables = {"documents": None, **self._variables, **variables}
        try:
            return self._sandbox.render(self._templates[name], _plain(variables))
        except Refusal as error:
            raise InvalidChat(str(error)) from None
        except jinja2.exceptions.SecurityError as error:
            raise InvalidChat(f"the chat template did what is not allowed: {_one_line(error)}") from None
        except Exception as error:  # a template's code may raise anything on messages it was not written for
            raise InvalidChat(f"the chat template failed on these messages: {_one_line(error)}") from None

    def _accepted_content(self, role: str) -> Accepted:
        """What `content` may be in a role's messages, found by showing the template both."""
        parts = [{"type": "text", "text": _PROBE}]
        as_text, as_parts = (self._try({"role": role, "content": content}) for content in (_PROBE, parts))
        if _PROBE not in as_parts or repr(parts[0]) in as_parts:
            return "text"
        if as_text == as_parts:
            return "both"
        return "text" if _PROBE in as_text else "parts"

    def _try(self, message: Message) -> str:
        try:
            return self._run({"messages": [message], "tools": None, "add_generation_prompt": False})
        except InvalidChat:
            return ""


def load_chat_template(source: Source) -> ChatTemplate | None:
    """The checkpoint's template, or None if it has none. UserError if it is broken."""
    path = Path(source.path)
    if source.kind == "gguf":
        return _gguf_template(path)
    settings = checkpoint.tokenizer_settings(path)
    variables = checkpoint.special_texts(settings)
    file = path / "chat_template.jinja"
    if file.is_file():
        others = sorted((path / "additional_chat_templates").glob("*.jinja"))
        templates = {other.stem: _read(other) for other in others} | {"default": _read(file)}
        return ChatTemplate(templates, variables, origin=str(file))
    for name, found in (
        ("tokenizer_config.json", settings),
        ("chat_template.json", checkpoint.read_json(path / "chat_template.json")),
    ):
        if found.get("chat_template"):
            origin = str(path / name)
            return ChatTemplate(_named(found["chat_template"], origin), variables, origin=origin)
    return None


def _read(file: Path) -> str:
    try:
        return file.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: cannot be read: {error}") from None


def _gguf_template(path: Path) -> ChatTemplate | None:
    from headrace.text.tokenizer_gguf import gguf_special_texts
    from headrace.weights.gguf_file import read_gguf

    metadata = read_gguf(path, ("tokenizer.ggml.tokens",)).metadata
    template = metadata.get("tokenizer.chat_template")
    if not template:
        return None
    templates = {"default": template}
    for key, value in metadata.items():
        if key.startswith("tokenizer.chat_template.") and isinstance(value, str):
            templates[key.removeprefix("tokenizer.chat_template.")] = value
    return ChatTemplate(templates, gguf_special_texts(metadata), origin=f"{path}: tokenizer.chat_template")


def _named(templates: Any, origin: str) -> dict[str, str]:
    """One template, or a list of named ones."""
    entries = [{"name": "default", "template": templates}] if isinstance(templates, str) else templates
    try:
        named = {entry["name"]: entry["template"] for entry in entries}
    except (TypeError, KeyError):
        named = {"": None}
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise UserError(f"{origin}: chat_template must be a text, or a list of entries with a name and a template")
    return named


# --- messages -------------------------------------------------------------------------------------------------------


def _message(where: str, message: Message, accepted: Mapping[str, Accepted]) -> dict[str, Any]:
    """One message as the template expects it; `where` names it in errors."""
    if not isinstance(message, Mapping):
        raise InvalidChat(f"{where}: must be an object with a role and a content")
    # Templates test for a missing key, and write None as "None".
    prepared = {key: value for key, value in message.items() if value is not None}
    reasoning = next((prepared[key] for key in _REASONING if key in prepared), None)
    if reasoning is not None:  # each engine and template has its own name for it
        prepared = {"thinking": reasoning, **prepared, "reasoning_content": reasoning}
    if "content" in prepared:
        form = accepted.get(str(prepared.get("role")), "text")
        prepared["content"] = _content(f"{where}.content", prepared["content"], form)
    if isinstance(calls := prepared.get("tool_calls"), list):
        prepared["tool_calls"] = [_tool_call(call) for call in calls]
    return prepared


def _content(where: str, content: Any, accepted: Accepted) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if accepted == "parts" else content
    if not isinstance(content, list):
        raise InvalidChat(f"{where}: must be a text or a list of parts")
    texts = [_part(f"{where}[{i}]", part) for i, part in enumerate(content)]
    return "\n".join(texts) if accepted == "text" else [{"type": "text", "text": text} for text in texts]


def _part(where: str, part: Any) -> str:
    """The text of one part of a content."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise InvalidChat(f"{where}: must be an object with a type")
    if "image" in kind:
        raise InvalidChat(f"{where}: images are not served; only text is")
    if kind not in _TEXT_PARTS:
        raise InvalidChat(f"{where}: a part of type {kind!r} is not served; only text is")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidChat(f"{where}.{_TEXT_PARTS[kind]}: must be a text")
    return text


def _tool_call(call: Any) -> Any:
    """A call whose arguments are an object: the API has them as JSON text, which many templates would quote again."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        parsed = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": parsed}} if isinstance(parsed, dict) else call


def _plain(value: Any) -> Any:
    """The value rebuilt of JSON's types, so that a template meets no object with methods of its own."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return f"<{type(value).__name__}>"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
