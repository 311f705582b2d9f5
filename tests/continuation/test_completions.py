"""Text prompts that begin with an earlier prompt and its completion."""

import pytest
from turns import text_step, turns_of

from proxy.continuation.completions import continue_text, match_text
from proxy.continuation.matching import Sampler
from proxy.continuation.types import Detokenize, LookupFailed, Tokenize

FIRST = text_step("s1", "Once", " upon", [1, 2], [3, 4])


def run(turn, prompt, texts, tokens):
    """Return the result of a continuation with this detokenizer and tokenizer."""
    generator = continue_text(turn, prompt)
    lookup = next(generator)
    assert isinstance(lookup, Detokenize)
    try:
        lookup = generator.send(texts)
        assert isinstance(lookup, Tokenize)
        generator.send(tokens(lookup.text))
    except StopIteration as end:
        return end.value
    raise AssertionError("another lookup")


def found(prompt, *others, policy="default", **body):
    return match_text(turns_of(FIRST, *others), {"prompt": prompt, **body}, Sampler("vllm", "policy", policy))


def test_the_recorded_ids_are_kept_and_the_rest_is_tokenized():
    """Only the new text goes to the tokenizer."""
    result = run(found("Once upon a time"), "Once upon a time", " upon", lambda text: [len(text)])

    assert [1, 2, 3, 4, 7] == result.ids.tolist()
    assert (4, 1) == (result.kept, result.bridge)


def test_a_stop_token_must_be_in_the_prompts_text():
    """Otherwise the agent's prompt lacks a token that was sampled."""
    prompt = "Once upon<end> and"

    assert [1, 2, 3, 4, 4] == run(found(prompt), prompt, " upon<end>", lambda text: [len(text)]).ids.tolist()
    assert "close" == run(found("Once upon and"), "Once upon and", " upon<end>", len).reason


def test_other_prompts_and_other_options_are_not_continued():
    """A first prompt is no refusal."""
    assert found("Twice upon") is None
    assert found(["Once upon a"]) is None
    assert "options" == found("Once upon a", add_special_tokens=False)
    assert "echo" == found("Once upon a", echo=True)


def test_a_prompt_continues_a_text_of_its_own_policy():
    """Although one of another policy is longer."""
    judged = text_step("s2", "Once", " upon a", [1, 2], [3, 4], policy="judge")

    assert ["s1", "s2"] == [found("Once upon a time", judged, policy=policy).step_id for policy in ("default", "judge")]
    assert "model" == found("Once upon a time", policy="judge")


def test_an_engine_without_a_tokenizer_fails_the_lookup():
    """The call is then sent unchanged."""
    with pytest.raises(LookupFailed):
        run(found("Once upon a"), "Once upon a", None, len)
    with pytest.raises(LookupFailed):
        run(found("Once upon a"), "Once upon a", " upon", lambda _: None)
