"""Chat templates render as transformers renders them, and none can hold up the process."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError, UnsupportedError
from jaxserve.tokenizer.chat_template import RESERVED_KWARGS, content_format, render
from jaxserve.tokenizer.fast_tokenizer import FastTokenizer

USER = [{"role": "user", "content": "Hi"}]
TURNS = [*USER, {"role": "assistant", "content": " a\n\n"}, *USER]
CHATML = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
TRIMMING = "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>{% endfor %}"
TOOLS = """{% if tools %}{% for tool in tools %}
{{ tool | tojson }}
{{ tool | tojson(indent=2) }}
{% endfor %}{% endif %}
{%- for m in messages %}{% if m.tool_calls %}{% for call in m.tool_calls %}
call {{ call.function.name }}({{ call.function.arguments | tojson }})
{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"""
LISTS = "{% for m in messages %}{% for part in m['content'] %}<{{ part.text }}>{% endfor %}{% endfor %}"
BOTH = """{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"""
MACROS = """{%- macro role(name, end='!') -%}<{{ name | upper }}{{ end }}>{%- endmacro -%}
{%- set ns = namespace(count=0, last='') -%}
{%- for m in messages -%}
  {%- if loop.index0 > 2 %}{% break %}{% endif -%}
  {%- if m.role == 'skip' %}{% continue %}{% endif -%}
  {%- set ns.count = ns.count + 1 -%}{%- set ns.last = m.content ~ '/' ~ loop.index -%}
  {{- role(m.role) }}{% generation %}{{ m.content }}{% endgeneration -%}
{%- endfor -%}
{{ ns.count }} {{ ns.last }} {{ messages[::-1][0].content }} {{ "**%s**-%03d 12345" % ("a", 7) }}
{{ "{:>5} {{123456}}".format("x") }}
{%- set block %}captured {{ ns.count }}{% endset %}{{ block }}
{{ dict(a=1).items() | list }} {{ ['a', 'b'] | join(', ') }}
{{ 'a-b' | replace('-', '+') }} {{ 'x'.split('x') }} {{ '%s 100000*' | format('y') }}"""
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "<b>\"é\" & 'q'</b>", "parameters": {"type": "object"}},
}
CALLS = [
    {"role": "user", "content": "go"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": [1, "é<"]}}}],
    },
]


def tokenizer(template: str | None = CHATML, **templates: str) -> Any:
    named = templates if template is None else {"default": template, **templates}
    return SimpleNamespace(
        chat_template=named.get("default"),
        chat_templates=named,
        special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"},
    )


def refused(match: str, param: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(InvalidRequestError, match=match) as error:
        render(*args, **kwargs)
    assert error.value.param == param


# --- what is rendered --------------------------------------------------------------------------------------


def test_a_conversation_and_the_generation_prompt():
    assert render(tokenizer(), USER) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(tokenizer(), USER, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


def test_smollm2_s_own_template(smollm2: FastTokenizer):
    assert render(smollm2, USER) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("template", [CHATML, TRIMMING, TOOLS, BOTH, MACROS])
@pytest.mark.parametrize("messages", [USER, TURNS, CALLS])
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize(("prompt", "continued"), [(True, False), (False, False), (False, True)])
def test_templates_render_as_in_transformers(template, messages, tools, prompt, continued):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    plain = [{k: v for k, v in message.items() if v is not None} for message in messages]
    arguments = {"add_generation_prompt": prompt, "continue_final_message": continued, "tools": tools}
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    try:
        (rendered, _) = utils.render_jinja_template([plain], chat_template=template, **arguments, **special)
    except Exception:
        with pytest.raises(InvalidRequestError):
            render(tokenizer(template), messages, **arguments)
        return
    # transformers leaves its mark of the end in text that a template shows twice.
    expected = rendered[0].replace("CONTINUE_FINAL_MESSAGE_TAG ", "")
    assert render(tokenizer(template), messages, **arguments) == expected


def test_json_is_written_as_transformers_writes_it():
    text = render(tokenizer(TOOLS), CALLS, tools=[TOOL])
    assert json.dumps(TOOL, ensure_ascii=False) in text
    assert json.dumps(TOOL, ensure_ascii=False, indent=2) in text
    assert 'call f({"a": [1, "é<"]})' in text


def test_arguments_of_tool_calls_in_openai_s_form_are_parsed():
    messages = json.loads(json.dumps(CALLS))
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"a": [1, "é<"]}'
    assert render(tokenizer(TOOLS), messages) == render(tokenizer(TOOLS), CALLS)
    assert isinstance(messages[1]["tool_calls"][0]["function"]["arguments"], str), (
        "the caller's stay as they are"
    )
    messages[1]["tool_calls"][0]["function"]["arguments"] = "{"
    refused(r"messages\[1\]\.tool_calls\[0\]\.function\.arguments", "messages", tokenizer(TOOLS), messages)


def test_special_tokens_and_kwargs_are_variables():
    template = "{{ bos_token }}{{ eos_token }}{{ enable_thinking }}{{ unknown is defined }}"
    assert render(tokenizer(template), USER, kwargs={"enable_thinking": False}) == "<s></s>FalseFalse"


@pytest.mark.parametrize("name", RESERVED_KWARGS)
def test_kwargs_may_not_replace_parameters(name: str):
    refused(name, "chat_template_kwargs", tokenizer(), USER, kwargs={name: "x"})


def test_the_date_can_be_asked_for():
    assert render(tokenizer("{{ strftime_now('%Y') }}"), USER) == time.strftime("%Y")


def test_reasoning_goes_by_all_its_names():
    template = "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{% endfor %}"
    for name in ("reasoning", "reasoning_content", "thinking"):
        assert render(tokenizer(template), [{"role": "assistant", "content": "x", name: "why"}]) == "whywhy"


def test_objects_with_model_dump_are_messages():
    class Message:
        def model_dump(self) -> dict[str, Any]:
            return {"role": "user", "content": "Hi", "name": None}

    assert render(tokenizer(), [Message()]) == render(tokenizer(), USER)  # type: ignore[list-item]


# --- which template ----------------------------------------------------------------------------------------


def test_the_right_template_is_chosen():
    several = tokenizer("default", tool_use="tools", other="other")
    assert render(several, USER) == "default"
    assert render(several, USER, tools=[TOOL]) == "tools"
    assert render(several, USER, chat_template="other") == "other"
    assert render(several, USER, chat_template="{{ 1 + 1 }}") == "2"
    assert render(None, USER, chat_template="{{ 1 + 1 }}") == "2"


def test_a_model_without_a_template_says_so():
    refused("no chat template", "messages", tokenizer(None), USER)
    refused("other", "messages", tokenizer(None, other="x"), USER)


# --- contents ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, "string"),
        (BOTH, "openai"),
        (LISTS, "openai"),
        (
            "{% for m in messages %}{% set c = m['content'] %}{% for p in c %}{% endfor %}{% endfor %}",
            "openai",
        ),
        ("{% for m in messages %}{% for p in m.content | list %}{% endfor %}{% endfor %}", "openai"),
        ("{% for m in messages %}{% for c in m.tool_calls %}{% endfor %}{% endfor %}", "string"),
        ("{% for content in messages %}{{ content.content }}{% endfor %}", "string"),
    ],
)
def test_the_content_format_is_read_off_the_template(template: str, expected: str):
    assert content_format(template) == expected


@pytest.mark.parametrize("kind", ["text", "input_text", "output_text"])
def test_text_parts_are_joined_or_handed_over(kind: str):
    parts = [{"role": "user", "content": [{"type": kind, "text": "a"}, {"type": kind, "text": "b"}]}]
    assert "user\na\nb<" in render(tokenizer(), parts)
    assert render(tokenizer(LISTS), parts) == "<a><b>"
    assert render(tokenizer(BOTH), parts) == "<a><b>"


def test_a_string_is_wrapped_for_a_template_that_only_takes_lists():
    assert render(tokenizer(LISTS), USER) == "<Hi>"
    assert render(tokenizer(BOTH), USER) == "Hi"


def test_other_parts_are_refused_by_name():
    parts = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(UnsupportedError, match=r"messages\[0\]\.content\[0\].*image_url"):
        render(tokenizer(), parts)


@pytest.mark.parametrize(
    "messages",
    [
        [], "Hi", {"role": "user"}, None, 5, [5], ["Hi"], [[]], [{}], [{"role": 5, "content": "x"}],
        [{"content": "x"}], [{"role": "user", "content": 5}], [{"role": "user", "content": {"a": 1}}],
        [{"role": "user", "content": [5]}], [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": [{"text": "x"}]}], [{"role": "user", "content": object()}],
        [{"role": "assistant", "tool_calls": 5}],
    ],
)  # fmt: skip
def test_messages_of_wrong_types_are_refused(messages: Any):
    with pytest.raises(InvalidRequestError) as error:
        render(tokenizer(), messages)
    assert error.value.param == "messages"


@pytest.mark.parametrize(("name", "value"), [("tools", ["x"]), ("tools", "x"), ("documents", [5])])
def test_tools_and_documents_are_lists_of_objects(name: str, value: Any):
    refused(name, name, tokenizer(), USER, **{name: value})


# --- going on with the final message -----------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHATML, TRIMMING])
def test_the_final_message_is_left_open(template: str):
    messages = [*USER, {"role": "assistant", "content": "Well, "}]
    text = render(tokenizer(template), messages, continue_final_message=True)
    assert text.endswith("Well, " if template == CHATML else "Well,")


def test_parts_are_continued_at_the_last_one():
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]}]
    assert render(tokenizer(LISTS), parts, continue_final_message=True) == "<a><b "


def test_a_final_message_that_cannot_be_continued_is_refused():
    refused("no text", "messages", tokenizer(), [{"role": "assistant"}], continue_final_message=True)
    dropped = tokenizer("{{ messages[0].role }}")
    refused("drops", "continue_final_message", dropped, USER, continue_final_message=True)


# --- broken and hostile templates --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    ["{% for %}", "{{ x", "{% if %}", "{{ 1 | nope }}", "{% unknown %}", "{% endfor %}",
     "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "x" * (2**20 + 1)],
)  # fmt: skip
def test_templates_that_do_not_compile_are_refused(template: str):
    refused("chat_template", "chat_template", tokenizer(template), USER)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ missing.attribute }}", "missing"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ 'a' + 1 }}", "TypeError"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ [].__class__() }}", "unsafe|not safely"),
        ("{% set ns = namespace() %}{% set ns.__init__ = 1 %}", "underscore"),
        ("{{ namespace(_x=1) }}", "underscore"),
        ("{% include 'x' %}", "loader"),
        ("{{ lipsum() }}", "lipsum"),
        ("{{ range(1000000) | list }}", "[Rr]ange"),
    ],
)
def test_errors_of_a_template_are_the_request_s(template: str, match: str):
    refused(match, "messages", tokenizer(template), USER)


NS = "{% set ns = namespace(x=[1], y=9, z='ab') %}{% for i in range(60) %}"
NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "nested loops": NESTED,
    "filtered loops": "{% for a in range(9999) %}{% for b in range(99999) if 0 %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(100) }}",
    "call blocks": "{% macro f(n) %}{% if n %}{{ caller() if caller }}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}"
    "{% endmacro %}{% call f(60) %}x{% endcall %}",
    "recursive loop": "{% for x in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 60 }}{% endfor %}",
    "output": "{% for a in range(99999) %}{% for b in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}",
    "shadowed": "{% set checkpoint = 1 %}" + NESTED,
    "map": "{% for a in range(99999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}",
}
HUGE = {
    "repeat": "{{ 'x' * 10 ** 9 }}",
    "repeat a list": "{{ ([1] * 10 ** 9) | length }}",
    "power": "{{ 9 ** (9 ** 9) }}",
    "product": NS + "{% set ns.y = ns.y * ns.y %}{% endfor %}",
    "double": NS + "{% set ns.z = ns.z + ns.z %}{% endfor %}",
    "double a list": NS + "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "concatenate": NS + "{% set ns.z = ns.z ~ ns.z %}{% endfor %}",
    "set block": NS + "{% set ns.z %}{{ ns.z }}{{ ns.z }}{% endset %}{% endfor %}",
    "macro text": "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}"
    + NS
    + "{% set ns.z = f(ns.z) %}{% endfor %}",
    "replace": "{% set x = 'a' * 100000 %}{{ x.replace('a', x) }}",
    "replace filter": "{% set x = 'a' * 100000 %}{{ x | replace('a', x) }}",
    "replace nothing": "{% set x = 'a' * 100000 %}{{ x.replace('', x) }}",
    "join": "{% set x = 'a' * 100000 %}{{ x.join(['b'] * 100000) }}",
    "join filter": "{% set x = 'a' * 100000 %}{{ (['b'] * 100000) | join(x) }}",
    "center": "{{ 'x'.center(10 ** 9) }}",
    "center filter": "{{ 'x' | center(1000000000) }}",
    "ljust": "{{ 'x'.ljust(1000000000) }}",
    "zfill": "{{ 'x'.zfill(1000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "indent": "{{ 'x\ny' | indent(1000000000) }}",
    "indent json": "{{ [1] | tojson(indent=1000000000) }}",
    "percent": "{{ '%1000000000d' % 5 }}",
    "percent star": "{{ '%*d' % (1000000000, 5) }}",
    "format": "{{ '{:1000000000}'.format(5) }}",
    "format filter": "{{ '%1000000000d' | format(5) }}",
    "nested format": "{{ '{:{}}'.format(5, 1000000000) }}",
    "strftime": "{{ strftime_now('%1000000000Y') }}",
    "batch": "{{ [1] | batch(1000000000, 'x') | list }}",
    "slice": "{{ [1] | slice(1000000000) | list }}",
    "wordwrap": "{{ ('x' * 100000) | wordwrap(1, true, 'y' * 100000) }}",
    "nested list": NS + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "nested json": NS + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
    "deep macros": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_templates_are_stopped(name: str):
    start = time.process_time()
    refused("too long|characters", "chat_template", tokenizer(ENDLESS[name]), USER, max_seconds=0.2)
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize("name", HUGE)
def test_templates_that_make_something_huge_are_stopped(name: str):
    start = time.process_time()
    with pytest.raises(InvalidRequestError):
        render(tokenizer(HUGE[name]), USER, max_seconds=2.0)
    assert time.process_time() - start < 4.0


def test_the_limits_leave_room_for_a_long_conversation():
    messages = [{"role": "user", "content": "word " * 2000}] * 500
    assert len(render(tokenizer(), messages)) > 5_000_000


def test_many_threads_render_at_once_each_with_its_own_limit():
    slow = tokenizer(NESTED)

    def one(index: int) -> str:
        if index % 4 == 0:
            with pytest.raises(InvalidRequestError, match="too long"):
                render(slow, USER, max_seconds=0.05)
            return "slow"
        return render(tokenizer(), [{"role": "user", "content": str(index)}])

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(one, range(40)))
    for index, result in enumerate(results):
        assert result == "slow" or f"user\n{index}<" in result


def test_rendering_again_is_cheap():
    render(tokenizer(), USER)
    start = time.process_time()
    for _ in range(100):
        render(tokenizer(), USER)
    assert (time.process_time() - start) / 100 < 2e-3
