from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from headrace.errors import UserError
from headrace.text.chat import ChatTemplate, InvalidChat, load_chat_template
from headrace.weights.source import ModelSource
from tests.text.gguf_vocabulary import byte_level_fields, write_gguf
from tests.text.sources import folder_source, gguf_source
from tests.text.templates import LISTS_ONLY, LLAMA_3, QWEN_3
from tests.tiny_tokenizer import CHATML, K2_TEMPLATE, byte_alphabet, write_tiny_tiktoken, write_tiny_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für <Stadt> & 'Umland'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "functions.get_weather:0", "type": "function"} | {
    "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": [1, 2]}}
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hi  \n"}],
    "system": [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "你好 😀"}],
    "turns": [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "<think>\nadd\n</think>\n\n2"},
        {"role": "user", "content": "and 2+2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "easy"},
    ],
    "tools": [
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": '{"sky": "blue"}'},
    ],
}
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA_3, "qwen3": QWEN_3, "k2": K2_TEMPLATE}


def template(source: str, **variables: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, variables, origin="test")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """`render(template, messages, ...)` as transformers does it."""
    folder = tmp_path_factory.mktemp("theirs")
    write_tiny_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)

    def render(source: str, messages: list[dict[str, Any]], **kwargs: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **kwargs))

    return render


# --- the same prompts as transformers -------------------------------------------------------------------------------


@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"date_string": "1 May 2030"}])
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("chat", list(CHATS))
@pytest.mark.parametrize("name", list(TEMPLATES))
def test_prompts_are_those_of_transformers(
    theirs: Callable[..., str], name: str, chat: str, generation: bool, tools: list[Any] | None, kwargs: dict[str, Any]
) -> None:
    ours = template(TEMPLATES[name], bos_token="<|endoftext|>", eos_token="<|im_end|>")
    options = {"tools": tools, "add_generation_prompt": generation, **kwargs}
    assert ours.render(CHATS[chat], **options) == theirs(TEMPLATES[name], CHATS[chat], **options)


def test_the_embedded_defaults_prompts_are_those_of_transformers(
    embedded_source: ModelSource, transformers_embedded: Any
) -> None:
    ours = load_chat_template(embedded_source)
    assert ours is not None
    for chat in CHATS.values():
        expected = transformers_embedded.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert ours.render(chat) == expected


def test_keys_without_a_value_are_missing_keys(theirs: Callable[..., str]) -> None:
    question = {"role": "user", "content": "Hi", "name": None}
    chat: list[dict[str, Any]] = [question, {"role": "assistant", "content": None, "tool_calls": [CALL]}]
    for source in (QWEN_3, K2_TEMPLATE, LLAMA_3):
        kwargs: dict[str, Any] = {"date_string": "x", "add_generation_prompt": True}
        assert template(source, bos_token="<|endoftext|>").render(chat, **kwargs) == theirs(source, chat, **kwargs)


def test_json_is_written_as_transformers_writes_it(theirs: Callable[..., str]) -> None:
    source = (
        "{{ tools[0] | tojson }}{{ tools | tojson(indent=2) }}{{ x | tojson(separators=(',', ':'), sort_keys=true) }}"
        "{{ x | tojson(ensure_ascii=true) }}"
    )
    kwargs: dict[str, Any] = {"tools": [TOOL], "x": {"b": "<é>", "a": [1.5, None, True]}}
    assert template(source).render(CHATS["one"], **kwargs) == theirs(source, CHATS["one"], **kwargs)


def test_a_clock_is_asked_for_the_date() -> None:
    now = datetime(2031, 2, 3, tzinfo=UTC)
    chat = ChatTemplate({"default": "{{ strftime_now('%d %b %Y') }}"}, {}, origin="test", now=lambda: now)
    assert chat.render([]) == "03 Feb 2031"


def test_k2_turns(tmp_path: Path) -> None:
    write_tiny_tiktoken(tmp_path)
    chat = load_chat_template(folder_source(tmp_path))
    assert chat is not None
    assert chat.render(CHATS["tools"]) == (
        "<|im_system|>system<|im_middle|>Use tools.<|im_end|><|im_user|>user<|im_middle|>Weather?<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Zürich", "days": [1, 2]}<|tool_call_end|><|tool_calls_section_end|>'
        "<|im_end|><|im_system|>tool<|im_middle|>## Return of functions.get_weather:0\n"
        '{"sky": "blue"}<|im_end|><|im_assistant|>assistant<|im_middle|>'
    )


# --- where templates come from --------------------------------------------------------------------------------------


def test_a_file_of_its_own_goes_before_the_config(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template="config")
    assert rendered(folder_source(tmp_path)) == "config"
    (tmp_path / "chat_template.jinja").write_text("file {{ bos_token }} {{ eos_token }}", "utf-8")
    assert rendered(folder_source(tmp_path)) == "file <|endoftext|> <|im_end|>"


def test_chat_template_json_is_read_last(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, chat_template=None)
    assert load_chat_template(folder_source(tmp_path)) is None
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}', "utf-8")
    assert rendered(folder_source(tmp_path)) == "json"


def test_named_templates_and_the_one_for_tools(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "with tools"}, {"name": "default", "template": "without"}]
    write_tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}), "utf-8")
    assert rendered(folder_source(tmp_path)) == rendered(folder_source(tmp_path), tools=[]) == "without"
    assert rendered(folder_source(tmp_path), tools=[TOOL]) == "with tools"


def test_additional_template_files(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("without", "utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools", "utf-8")
    assert rendered(folder_source(tmp_path)) == "without"
    assert rendered(folder_source(tmp_path), tools=[TOOL]) == "with tools"


def test_gguf_metadata(tmp_path: Path) -> None:
    fields = byte_level_fields([byte_alphabet()[byte] for byte in range(256)])
    assert load_chat_template(gguf_source(write_gguf(tmp_path / "no.gguf", **fields))) is None
    path = write_gguf(tmp_path / "yes.gguf", **fields, chat_template="{{ bos_token }}{{ messages[0].content }}")
    assert rendered(gguf_source(path)) == "<|end of text|>Hi  \n"


def rendered(source: ModelSource, **kwargs: Any) -> str:
    chat = load_chat_template(source)
    assert chat is not None
    return chat.render(CHATS["one"], **kwargs)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"chat_template": "{% if %}"}, "the chat template is broken at line 1"),
        ({"chat_template": "a\n{% endfor %}"}, "the chat template is broken at line 2"),
        ({"chat_template": [{"name": "tool_use", "template": "x"}]}, "no chat template is named 'default'"),
        ({"chat_template": [{"name": "default"}]}, "chat_template must be a text"),
        ({"chat_template": 5}, "chat_template must be a text"),
        ({"chat_template": {"default": "x"}}, "chat_template must be a text"),
        ({"chat_template": "{{" + "(" * 5000}, "the chat template"),
    ],
)
def test_a_broken_template_is_named(tmp_path: Path, config: dict[str, Any], problem: str) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(UserError, match=rf"tokenizer_config\.json: {problem}") as raised:
        load_chat_template(folder_source(tmp_path))
    assert "\n" not in str(raised.value)


# --- messages -------------------------------------------------------------------------------------------------------


def test_parts_become_one_text_where_the_template_wants_texts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert template("{{ messages[0].content }}").render([{"role": "user", "content": parts}]) == "a\nb"
    assert "user\na\nb<|im_end|>" in template(QWEN_3).render([{"role": "user", "content": parts}])


def test_parts_stay_parts_where_the_template_reads_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "<|im_middle|>ab<|im_end|>" in template(K2_TEMPLATE).render([{"role": "user", "content": parts}])


def test_a_text_becomes_a_part_where_the_template_reads_parts_only() -> None:
    chat = template(LISTS_ONLY)
    assert chat.render([{"role": "user", "content": "a"}]) == "user:\n[a];\n"
    assert chat.render([{"role": "user", "content": [{"type": "text", "text": "b"}]}]) == "user:\n[b];\n"


def test_a_role_whose_content_is_written_as_it_is_gets_a_text() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' and m.content is not string %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat = template(source)
    assert chat.render([{"role": "user", "content": parts}, {"role": "system", "content": parts}]) == "aba\nb"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], r"messages\[0\]\.content\[0\]: images are not served"),
        ([{"type": "text", "text": "a"}, {"type": "image"}], r"messages\[0\]\.content\[1\]: images are not served"),
        ([{"type": "input_audio"}], r"content\[0\]: a part of type 'input_audio' is not served; only text is"),
        ([{"type": "text"}], r"content\[0\]\.text: must be a text"),
        ([{"type": "text", "text": 5}], r"content\[0\]\.text: must be a text"),
        (["a"], r"content\[0\]: must be an object with a type"),
        ([{"type": ["text"]}], r"content\[0\]: must be an object with a type"),
        (5, r"messages\[0\]\.content: must be a text or a list of parts"),
        ({"text": "a"}, r"messages\[0\]\.content: must be a text or a list of parts"),
    ],
)
def test_content_that_is_not_text_is_refused(content: Any, problem: str) -> None:
    with pytest.raises(InvalidChat, match=problem):
        template(CHATML).render([{"role": "user", "content": content}])


def test_messages_that_are_not_objects_are_refused() -> None:
    with pytest.raises(InvalidChat, match=r"messages\[1\]: must be an object"):
        template(CHATML).render([{"role": "user", "content": "a"}, "b"])  # type: ignore[list-item]  # a client's mistake


def test_arguments_in_json_text_are_read() -> None:
    text = '{"city":"Zürich","days":[1,2]}'
    call: dict[str, Any] = {**CALL, "function": {"name": "get_weather", "arguments": text}}
    chat = [*CHATS["tools"][:2], {"role": "assistant", "tool_calls": [call]}]
    expected = [*CHATS["tools"][:2], {"role": "assistant", "tool_calls": [CALL]}]
    assert template(LLAMA_3, bos_token="").render(chat) == template(LLAMA_3, bos_token="").render(expected)
    assert call["function"]["arguments"] == text  # the caller's message is left alone
    broken = {**CALL, "function": {"name": "f", "arguments": '{"city": '}}
    assert '"arguments": {"city": }' in template(QWEN_3).render([{"role": "assistant", "tool_calls": [broken]}])


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "thinking"])
def test_thinking_is_found_under_each_name(key: str) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", key: "hmm"}]
    source = "{{ messages[1].reasoning_content }} {{ messages[1].thinking }}"
    assert template(source).render(chat) == "hmm hmm"


def test_a_templates_refusal_is_told_in_its_own_words() -> None:
    with pytest.raises(InvalidChat, match=r"^This model only supports single tool-calls at once!$") as raised:
        template(LLAMA_3, bos_token="").render([{"role": "assistant", "tool_calls": [CALL, CALL]}])
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([{"content": "no role"}], "the chat template failed on these messages: .*'role'"),
        ([{"role": 5, "content": "x"}], "the chat template failed on these messages: TypeError"),
        ([], "the chat template failed on these messages"),
    ],
)
def test_messages_that_a_template_was_not_written_for(messages: list[dict[str, Any]], problem: str) -> None:
    with pytest.raises(InvalidChat, match=problem):
        template(CHATML + "{{ messages[0].role + '' }}").render(messages)


def test_more_variables_may_not_replace_the_messages() -> None:
    with pytest.raises(InvalidChat, match="chat_template_kwargs: messages is not for the template's keywords"):
        template(CHATML).render([], messages=[])


def test_any_other_name_may_be_a_variable() -> None:
    variables: dict[str, Any] = {"self": 1, "variables": 2, "not an identifier": 3}
    assert template("{{ variables }}").render([], **variables) == "2"


def test_deeply_nested_values_are_refused_not_fatal() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(InvalidChat, match="RecursionError"):
        template(CHATML).render(CHATS["one"], deep=deep)
    while isinstance(deep, list):  # taken apart by hand: Python frees nested lists by recursion
        deep = deep.pop()


def test_objects_with_methods_of_their_own_do_not_reach_a_template() -> None:
    class Text(str):
        __slots__ = ()

        def shout(self) -> str:
            return self.upper()

    source = "{{ messages[0].content }} {{ messages[0].content.shout is defined }} {{ other }}"
    assert template(source).render([{"role": "user", "content": Text("a")}], other=object()) == "a False <object>"
