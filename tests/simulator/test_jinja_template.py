"""Chat templates in Jinja."""

from datetime import datetime

import pytest

from proxy.simulator.errors import RequestError
from proxy.simulator.jinja_template import JinjaTemplate
from proxy.simulator.template import prepare_for_vllm

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b":"ø","a":[1,2]}'}}
CHATML = """{% for message in messages %}
<|im_start|>{{ message.role }}
{{ message.content | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def render(
    source, messages=(USER,), *, tools=None, generation=True, continues=False, own=None, eos="</s>", **variables
):
    """The prompt of a template."""
    return JinjaTemplate(source, eos).render(
        prepare_for_vllm(messages),
        tools=tools,
        add_generation_prompt=generation,
        continue_final_message=continues,
        variables=variables,
        source=own,
    )


def test_blocks_leave_no_lines():
    """The newline after a block and the spaces before it are removed, as in transformers."""
    assert render(CHATML) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, generation=False) == "<|im_start|>user\nHi<|im_end|>\n"
    assert render("{% if true %}\na\n{% endif %}\n  {% if true %}\nb{% endif %}") == "a\nb"


def test_json_is_written_as_by_json_dumps():
    """`tojson` keeps letters and HTML characters, has the separators of `json.dumps`, and takes an indent."""
    source = "{% for m in messages %}{{ m.tool_calls[0].function.arguments | tojson }}{% endfor %}"
    message = {"role": "assistant", "content": None, "tool_calls": [CALL]}

    assert render(source, [message]) == '{"b": "ø", "a": [1, 2]}'
    assert render("{{ {'a': 1} | tojson(indent=1) }}") == '{\n "a": 1\n}'
    assert render("{{ '<é>' | tojson }}") == '"<é>"'


def test_tools_have_the_keys_that_vllm_keeps():
    """A tool has name, description and parameters in this order, null if they are absent."""
    tools = [{"function": {"parameters": {}, "name": "f", "x": 1}, "type": "function"}]

    assert (
        render("{{ tools | tojson }}", tools=tools)
        == '[{"type": "function", "function": {"name": "f", "description": null, "parameters": {}}}]'
    )


def test_messages_are_prepared_as_by_vllm():
    """Content None is empty text, parts are joined by newlines, reasoning has both names, and calls keep their ids."""
    source = (
        "{% for m in messages %}{{ [m.content, m.reasoning, m.reasoning_content, m.name, m.tool_call_id] }}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": []},
        {"role": "tool", "content": "t", "tool_call_id": "c1"},
    ]
    user = "['a\\nb', Undefined, Undefined, 'ann', Undefined]"
    assistant = "['', 'r', 'r', Undefined, Undefined]"

    assert render(source, messages) == user + assistant + "['t', Undefined, Undefined, Undefined, 'c1']"
    assert (
        render(
            "{{ messages[0].tool_calls[0].id }}{{ ('tool_calls' in messages[1]) | tojson }}",
            [{"role": "assistant", "tool_calls": [CALL]}, messages[1]],
        )
        == "c1false"
    )


@pytest.mark.parametrize("loop", ["m['content']", "m.content", "m.content | selectattr('type', 'equalto', 'text')"])
def test_a_template_with_a_loop_over_content_receives_lists_of_parts(loop):
    """Empty content has no parts, and results of tools are text, as in vLLM."""
    source = f"{{% for m in messages %}}{{% for part in {loop} %}}[{{{{ part.text }}}}]{{% endfor %}}|{{% endfor %}}"
    messages = [
        USER,
        {"role": "assistant", "content": None},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ]
    tool = "{% for m in messages %}{{ m.content }}{% for part in m.content if false %}{% endfor %}{% endfor %}"

    assert render(source, messages) == "[Hi]||[a]|"
    assert render(tool, [{"role": "tool", "content": "t"}]) == "t"


def test_variables_come_from_the_request():
    """`chat_template_kwargs` are variables of the template; they do not replace messages and special tokens."""
    template = JinjaTemplate("{{ bos_token }}{{ eos_token }}{{ x }}{{ documents }}{{ messages | length }}", "</s>")
    fixed = {"tools": None, "add_generation_prompt": True, "continue_final_message": False}

    assert template.render([USER], **fixed, variables={"x": 7, "messages": [], "eos_token": "y"}) == "<s></s>7None1"


def test_a_request_can_have_its_own_template():
    """A template of the request replaces the engine's."""
    assert render(CHATML, own="own") == "own"


def test_templates_have_transformers_functions():
    """`strftime_now`, `break` and generation blocks work, and messages cannot be changed."""
    assert f"{datetime.now().astimezone():%Y}" == render("{{ strftime_now('%Y') }}")
    assert render("{% for i in range(9) %}{{ i }}{% break %}{% endfor %}") == "0"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "Hi"
    with pytest.raises(RequestError, match="append"):
        render("{{ messages.append(1) }}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ a.b.c }}", "a"),
    ],
)
def test_an_error_of_the_template_is_a_400(source, message):
    """An exception in the template is a 400 error with its text."""
    with pytest.raises(RequestError, match=message) as error:
        render(source)

    assert error.value.status == 400


def test_an_invalid_template_is_refused():
    """A template with a syntax error is refused at the start of the engine, and is a 400 error in a request."""
    with pytest.raises(ValueError, match="the chat template is invalid: line 2"):
        JinjaTemplate("\n{% if %}", "</s>")
    with pytest.raises(RequestError):
        render(CHATML, own="{% if %}")


DEVELOPER = [{"role": "system", "content": "a"}, USER, {"role": "developer", "content": "b"}]
ROLES = "{% for m in messages %}{{ m.role }}:{{ m.content | replace('\\n', '/') }} {% endfor %}"


def test_developer_messages_become_one_system_message_unless_the_template_has_the_role():
    """A template that does not name the role gets one system message with all texts, as from vLLM."""
    assert render(ROLES, DEVELOPER) == "system:a//b user:Hi "
    assert render(ROLES + "{# 'developer' #}", DEVELOPER) == "system:a user:Hi developer:b "
    assert render(ROLES, DEVELOPER[:2]) == "system:a user:Hi "


@pytest.mark.parametrize("text", ["One", " One ", "Hi"])
def test_a_final_message_can_be_continued(text):
    """With `continue_final_message` the prompt ends inside the last message, even if its text occurs before."""
    prompt = render(CHATML, [USER, {"role": "assistant", "content": text}], generation=False, continues=True)

    assert f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{text.strip()}" == prompt


def test_a_final_message_that_is_not_rendered_cannot_be_continued():
    """A template that drops the last message is an error with `continue_final_message`."""
    with pytest.raises(RequestError, match="does not appear"):
        render("x", continues=True)
