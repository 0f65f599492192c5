"""Chat templates give the text that transformers gives, and fail in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_tokenizers import CHATML, byte_level_tokenizer
from unisono.launcher.text.chat_template import ChatTemplate, read_templates
from unisono.models.config import ConfigError

SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}

LLAMA2 = """{% if messages[0]['role'] == 'system' %}
    {% set loop_messages = messages[1:] %}
    {% set system_message = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
{% else %}
    {% set loop_messages = messages %}
    {% set system_message = '' %}
{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate\\nuser/assistant!') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {% set opening = system_message if loop.index0 == 0 else '' %}
{{ bos_token + '[INST] ' + opening + message['content'] | trim + ' [/INST]' }}
    {% else %}
{{ ' ' + message['content'] | trim + ' ' + eos_token }}
    {% endif %}
{% endfor %}
"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "assistant" and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- for tool_call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n' + (tool_call.function | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

ODD = """
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
  {% generation %}
  {% set inner = message.content %}
{{ inner }}|{{ missing }}|{{ pad_token }}|{{ inner is defined }}
  {% endgeneration %}
    {% if loop.index > 2 %}{% break %}{% endif %}
{% endfor %}
{{ {'b': 'é<&>', 'a': [1, none, true]} | tojson }} {{ messages | tojson(sort_keys=true, indent=2) }}
{{ range(3) | list }} {{ dict(a=1) }}
"""

TURNS = [
    {"role": "user", "content": "  What is <b>this</b> & 'that'? 한국어 👋 "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nIt is fine.", "tool_calls": None},
    {"role": "user", "content": "And\n\nnow?"},
]
SYSTEM = [{"role": "system", "content": "Be brief."}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é <x>", "parameters": {}}}]
CALLS = [
    {"role": "user", "content": "Call f."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    },
]


def oracle_text(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), **SPECIAL)
    tokenizer.chat_template = template
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize("prompted", [True, False], ids=["prompted", "plain"])
@pytest.mark.parametrize(
    "messages", [TURNS, SYSTEM + TURNS, TURNS[:1]], ids=["turns", "sys", "one"]
)
@pytest.mark.parametrize(
    ("template", "options"),
    [
        (CHATML, {}),
        (LLAMA2, {}),
        (LLAMA3, {}),
        (LLAMA3, {"tools": TOOLS}),
        (LLAMA3, {"date_string": "1 Jan 2030", "bos_token": "<other>"}),
        (QWEN3, {}),
        (QWEN3, {"enable_thinking": False}),
        (QWEN3, {"enable_thinking": True, "tools": TOOLS}),
        (ODD, {}),
        (ODD, {"documents": [{"title": "t", "text": "x"}], "missing": "here"}),
    ],
    ids=[
        *("chatml", "llama2", "llama3", "llama3-tools", "llama3-date"),
        *("qwen3", "qwen3-quick", "qwen3-tools", "odd", "odd-documents"),
    ],
)
def test_text_equals_that_of_transformers(
    template: str, options: dict[str, Any], messages: list[dict[str, Any]], prompted: bool
):
    ours = ChatTemplate({"default": template}, SPECIAL).render(messages, prompted, **options)
    assert ours == oracle_text(template, messages, add_generation_prompt=prompted, **options)
    assert ours.strip()


def test_fields_that_are_none_are_left_out_as_in_transformers():
    ours = ChatTemplate({"default": QWEN3}, SPECIAL).render(CALLS)
    assert ours == oracle_text(QWEN3, CALLS, add_generation_prompt=True)
    assert "None" not in ours
    assert '<tool_call>\n{"name": "f"' in ours


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (LLAMA2, "refuses these messages: Conversation roles must alternate user/assistant!"),
        ("{% for m in messages %}{{ m.content }}", "does not compile: line 1: Unexpected end"),
        ("{{ messages[0].name.first }}", "refuses these messages: .* has no attribute 'name'"),
        ("{{ nobody.name }}", "refuses these messages: 'nobody' is undefined"),
        ("{{ nobody() }}", "refuses these messages: 'nobody' is undefined"),
        ("{{ 1 + 'a' }}", "refuses these messages: unsupported operand"),
        ("{{ messages.append(1) }}", "refuses these messages: .*unsafe|not safely callable"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages: access to attribute '__class__'"),
        ("{{ 'x' | nofilter }}", "does not compile: line 1: No filter named 'nofilter'"),
    ],
)
def test_failures_are_one_line(template: str, message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        ChatTemplate({"default": template}, SPECIAL).render([{"role": "assistant", "content": "x"}])
    assert "\n" not in str(caught.value)


def test_a_message_that_is_no_object_is_refused():
    with pytest.raises(ConfigError, match="refuses these messages"):
        ChatTemplate({"default": CHATML}, {}).render(["hello"])  # type: ignore[list-item]


def test_a_template_cannot_change_the_messages_of_the_caller():
    messages = [{"role": "user", "content": "x", "note": None}]
    ChatTemplate({"default": CHATML}, SPECIAL).render(messages)
    assert messages == [{"role": "user", "content": "x", "note": None}]


def test_tools_choose_the_template_for_tools():
    template = ChatTemplate({"default": "plain", "tool_use": "tools"}, {})
    assert template.render(TURNS) == "plain"
    assert template.render(TURNS, tools=TOOLS) == "tools"
    assert template.render(TURNS, tools=None) == "plain"
    assert ChatTemplate({"default": "plain"}, {}).render(TURNS, tools=TOOLS) == "plain"
    with pytest.raises(ConfigError, match=r"no chat template named 'default' \(it has: tool_use\)"):
        ChatTemplate({"tool_use": "tools"}, {}).render(TURNS)
    with pytest.raises(ConfigError, match=r"\(it has: none\); give a raw prompt"):
        ChatTemplate({}, {}).render(TURNS)


def test_files_win_over_the_configuration(tmp_path: Path):
    config: dict[str, Any] = {"chat_template": "from the configuration"}
    assert read_templates(tmp_path, {}) == {}
    assert read_templates(tmp_path, config) == {"default": "from the configuration"}
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    assert read_templates(tmp_path, {"chat_template": named}) == {"default": "d", "tool_use": "t"}
    (tmp_path / "chat_template.jinja").write_text("from the file é\n", encoding="utf-8")
    assert read_templates(tmp_path, config) == {"default": "from the file é\n"}
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert read_templates(tmp_path, config) == {
        "default": "from the file é\n",
        "tool_use": "with tools",
    }


@pytest.mark.parametrize(
    "field", [3, {"default": "x"}, ["x"], [{"name": "default"}]], ids=json.dumps
)
def test_other_forms_of_the_configuration_are_refused(tmp_path: Path, field: object):
    with pytest.raises(ConfigError, match=r"neither a text nor a list of \{name, template\}"):
        read_templates(tmp_path, {"chat_template": field})
