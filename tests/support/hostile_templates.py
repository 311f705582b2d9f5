"""Chat templates that are hard to continue: each breaks an assumption about where a turn ends, or what follows it."""

_STOP = ("<|im_end|>",)
_PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_CALLS = "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
_THOUGHTS = "{% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}"
_CONTENT = "{{ m.content }}"
_BODY = _THOUGHTS + _CONTENT + _CALLS
_START = "<|im_start|>{{ m.role }}\n"
_END = "<|im_end|>\n"
_MESSAGE = _START + _BODY + _END
_RESULT = "<|im_start|>tool\n{{ t.content }}<|im_end|>\n"
_IF_LAST_RESULT = "{% if m.role == 'tool' and (loop.last or loop.nextitem.role != 'tool') %}"
_QUOTE = "{% if not loop.first and m.role == 'user' %}> {{ loop.previtem.content }}\n{% endif %}"
_LAST_USER = (
    "{% for m in messages if m.role == 'user' %}{% if loop.last %}Answer: {{ m.content }}"
    + _END
    + "{% endif %}{% endfor %}"
)


def _each(message: str, before: str = _TOOLS, after: str = _PROMPT) -> str:
    return f"{before}{{% for m in messages %}}{message}{{% endfor %}}{after}"


def _with(old: str, new: str) -> str:
    return _each(_MESSAGE.replace(old, new))


_MERGED = (
    "{% if m.role == ROLE and not loop.first and loop.previtem.role == ROLE %}\n{% else %}" + _START + "{% endif %}" + _BODY +
    "{% if m.role != ROLE or loop.last or loop.nextitem.role != ROLE %}" + _END + "{% endif %}"
)  # fmt: skip

_TEMPLATES = {
    "plain": _each(_MESSAGE),
    "begins_only": "<bos>" + _each(_START + _BODY + "\n"),
    "merged_assistants": _each(_MERGED.replace("ROLE", "'assistant'")),
    "merged_users": _each(_MERGED.replace("ROLE", "'user'")),
    "stop_after_each_piece": _each(
        _START + "{% if m.reasoning %}<think>{{ m.reasoning }}</think><|im_end|>{% endif %}"
        "{% if m.content %}{{ m.content }}<|im_end|>{% endif %}"
        "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call><|im_end|>{% endfor %}\n"
    ),
    "message_index": _with("{{ m.role }}", "{{ m.role }} {{ loop.index }}"),
    "message_count": _each(_MESSAGE, before="{{ messages | length }} messages\n" + _TOOLS),
    "count_at_the_end": _each(_MESSAGE, after="[{{ messages | length }}]\n" + _PROMPT),
    "content_after_results": _each(
        _START + _THOUGHTS + "{% if not m.tool_calls %}{{ m.content }}{% endif %}" + _CALLS + _END + _IF_LAST_RESULT
        + "{% for a in messages[:loop.index0] if a.tool_calls %}{% if loop.last %}<|im_start|>assistant\n{{ a.content }}" + _END
        + "{% endif %}{% endfor %}{% endif %}"
    ),
    "content_dropped_beside_calls": _with(_CONTENT, "{% if not m.tool_calls %}{{ m.content }}{% endif %}"),
    "content_after_calls": _each(_START + _THOUGHTS + _CALLS + _CONTENT + _END),
    "date": _each(_MESSAGE, before="{{ strftime_now('%d %B') }}\n" + _TOOLS),
    "date_in_messages": _with("{{ m.role }}", "{{ m.role }} {{ strftime_now('%d %B') }}"),
    "window": _each(_MESSAGE, before="{% set messages = messages[-3:] %}" + _TOOLS),
    "reminder": _each(_MESSAGE, after=_LAST_USER + _PROMPT),
    "reply_length": _with(_END, "<|im_end|>{{ m.content | length }}\n"),
    "length_class": _with(_END, "<|im_end|>{% if m.content | length > 20 %} long{% endif %}\n"),
    "quotes_the_reply": _each(_START + _QUOTE + _BODY + _END),
    "quotes_the_beginning": _each(_START + _QUOTE.replace("content", "content[8:12]") + _BODY + _END),
    "results_by_id": _each(
        "{% if m.role != 'tool' %}" + _MESSAGE + "{% endif %}" + _IF_LAST_RESULT
        + "{% for t in messages | selectattr('role', 'equalto', 'tool') | sort(attribute='tool_call_id') %}"
        + _RESULT + "{% endfor %}{% endif %}"
    ),
    "all_results_again": _each(
        "{% if m.role != 'tool' %}" + _MESSAGE + "{% endif %}" + _IF_LAST_RESULT
        + "{% for t in messages[:loop.index] if t.role == 'tool' %}" + _RESULT + "{% endfor %}{% endif %}"
    ),
    "reply_twice": _each(
        _MESSAGE + "{% if m.role == 'assistant' %}<|im_start|>summary\n{{ m.content }}{{ m.reasoning }}" + _END + "{% endif %}"
    ),
    "ids_of_calls": _each(
        _MESSAGE.replace("call.function | tojson", "call | tojson").replace("{{ m.role }}", "{{ m.role }} {{ m.tool_call_id }}")
    ),
    "content_without_lines": _with(_CONTENT, "{{ m.content | replace('\\n', ' ') }}"),
    "beginning_of_replies": _each(
        _START + _THOUGHTS + "{% if m.role == 'assistant' and not loop.last %}{{ m.content[:5] }}{% else %}{{ m.content }}"
        "{% endif %}" + _CALLS + _END
    ),
    "thoughts_after_results": _each(
        _START + _CONTENT + _CALLS + _END + _IF_LAST_RESULT
        + "{% for a in messages[:loop.index0] if a.reasoning %}{% if loop.last %}<|im_start|>notes\n{{ a.reasoning }}" + _END
        + "{% endif %}{% endfor %}{% endif %}"
    ),
    "reply_before_the_prompt": _each(
        _MESSAGE,
        after="{% for a in messages if a.role == 'assistant' %}{% if loop.last %}<|im_start|>before\n{{ a.content }}" + _END
        + "{% endif %}{% endfor %}" + _PROMPT,
    ),
    "newest_first": _each(_MESSAGE).replace("in messages", "in messages | reverse", 1),
    "turn_number": _each(
        "{% if m.role == 'assistant' %}" + _MESSAGE.replace(_END, "<|im_end|>{{ loop.index // 2 }}\n")
        + "{% else %}" + _MESSAGE + "{% endif %}"
    ),
    "stop_on_both_sides": _each(
        "<|im_end|>{{ m.role }}\n" + _BODY + "<|im_end|>",
        after="{% if add_generation_prompt %}<|im_end|>assistant\n{% endif %}",
    ),
    "double_stop": _with(_END, "<|im_end|><|im_end|>\n"),
    "upper_case": _with(_CONTENT, "{{ m.content | upper }}"),
    "json_content": _with(_CONTENT, "{{ m.content | tojson }}"),
    "other_system_last": _each(
        _MESSAGE, after="{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}" + _PROMPT
    ),
    "system_first": _TOOLS
    + "{% for m in messages if m.role == 'system' %}{{ m.content }}\n{% endfor %}"
    + _each("{% if m.role != 'system' %}" + _MESSAGE + "{% endif %}", before=""),
    "thoughts_of_the_last_turn": _with("{% if m.reasoning %}", "{% if m.reasoning and loop.last %}"),
    "only_names_of_calls": _with("call.function | tojson", "call.function.name"),
    "calls_as_text_of_results": _each(
        _START + _THOUGHTS + "{{ m.content }}{% if m.role == 'tool' %}"
        "{% for a in messages[:loop.index0] %}{% for call in a.tool_calls or [] if call.id == m.tool_call_id %}"
        " = {{ call.function | tojson }}{% endfor %}{% endfor %}{% endif %}" + _END
    ),
}  # fmt: skip

# name: (source, stop tokens)
HOSTILE = {name: (source, _STOP) for name, source in _TEMPLATES.items()} | {
    "no_special_close": (
        _each("{{ m.role }}: " + _BODY + "\n\n", after="{% if add_generation_prompt %}assistant:{% endif %}"),
        ("<|endoftext|>",),
    ),
    "separator_at_the_start": (
        _each("<|sep|>{{ m.role }}\n" + _BODY, after="{% if add_generation_prompt %}<|sep|>assistant\n{% endif %}"),
        ("<|sep|>",),
    ),
}
