"""The markers of chat templates."""

import pytest

from proxy.simulator.template import BOS, markers_of, read_template, uses_bos

EOS = "<|im_end|>"


MARKERS = """
<|eot_id|> <|tool_call> <tool_call|> <\uff5cUser\uff5c> <\uff5ctool\u2581sep\uff5c>
<sop> </arg_key> <atem:invoke> [INST] [/INST] [TOOL_CALLS]
"""


@pytest.mark.parametrize("marker", MARKERS.split())
def test_a_marker_is_found(marker):
    """Bars beside brackets, tags without attributes and upper-case names in square brackets are markers."""
    assert [marker] == markers_of(f"{{{{ 'a{marker}b' }}}}{{% if x %}}{marker}{{% endif %}}", EOS)


@pytest.mark.parametrize(
    "text",
    [
        "{{ a < b > c }}",
        "{{ '<|' + role + '|>' }}",
        "<function=f>",
        "{# <|x|> #}",
        "{{ x[1:] }}",
        "[a]",
        "[A]",
        "{{ a[B] }}",
    ],
)
def test_other_text_is_no_marker(text):
    """Comparisons, slices, comments, and markers that a template composes have no single token."""
    assert [] == markers_of(text, EOS)


def test_markers_are_listed_once_without_the_tokens_of_every_model():
    """Each marker is listed once, in the order of the template; the tokens of ChatML are there anyway."""
    assert ["<b>", "<a>"] == markers_of("<b><a><b><|im_start|><think>", EOS)


def test_a_template_that_names_bos_or_eos_writes_them():
    """`bos_token` and `eos_token` are variables whose values are markers."""
    assert [BOS, "</s>"] == markers_of("{{ bos_token }}x{{ eos_token }}", "</s>")
    assert [] == markers_of("{# bos_token #}{{ eos_token }}", EOS)
    assert uses_bos("{{ bos_token }}")
    assert not uses_bos("{# bos_token #}")


def test_a_template_is_read_from_a_file(tmp_path):
    """The file is UTF-8."""
    (tmp_path / "t.jinja").write_text("<\uff5cUser\uff5c>", encoding="utf-8")

    assert "<\uff5cUser\uff5c>" == read_template(tmp_path / "t.jinja")
