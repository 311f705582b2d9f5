"""The response stream of an engine: the moment at which the end begins. Recorded ones: test_exchange.py."""

from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines import ENGINES
from proxy.protocols.engines.base import StripRules
from proxy.protocols.response import ClientView, StreamResponse


def view(choices: int | None = 1, **hidden) -> ClientView:
    return ClientView(DIALECTS["/v1/chat/completions"], ENGINES["vllm"], StripRules(**hidden), choices)


def chunk(index: int, finish: str = "null") -> bytes:
    return b'data: {"choices":[{"index":%d,"delta":{"content":"x"},"finish_reason":%s}]}\n\n' % (index, finish.encode())


def test_of_several_choices_the_last_finish_chunk_is_withheld():
    """The finish chunks of the other choices are forwarded at once."""
    reply = StreamResponse(view(choices=2))
    first, second = chunk(1, '"stop"'), chunk(0, '"stop"')

    assert first == reply.feed(first)
    assert reply.feed(second) == b""
    assert second == reply.finish()[0]


def test_the_first_finish_chunk_is_withheld_if_the_number_of_choices_is_unknown():
    """The last chunk is sent to the client after the step is stored."""
    reply = StreamResponse(view(choices=None))

    assert reply.feed(chunk(0, '"stop"') + chunk(1)) == b""


def test_an_incomplete_last_event_is_forwarded_unchanged():
    reply = StreamResponse(view())
    reply.feed(b'data: {"cho')
    end, response = reply.finish()

    assert (end, response.ended, response.problems) == (b'data: {"cho', False, ("unparsed_event",))


def test_comments_are_forwarded():
    """They are the engine's keep-alives."""
    assert StreamResponse(view()).feed(b": ping\n\n") == b": ping\n\n"


def test_the_model_field_is_replaced_by_the_clients_name():
    """Events without a model get none."""
    reply = StreamResponse(ClientView(DIALECTS["/v1/chat/completions"], ENGINES["vllm"], StripRules(), 1, "gpt-4o"))

    assert reply.feed(b'data: {"model":"m","choices":[]}\n\n') == b'data: {"model":"gpt-4o","choices":[]}\n\n'
    assert reply.feed(b'data: {"choices":[]}\n\n') == b'data: {"choices":[]}\n\n'


def test_nan_beside_stripped_fields_is_forwarded_unchanged():
    reply = StreamResponse(view(token_ids=True))
    event = b'data: {"choices":[{"index":0,"x":NaN,"token_ids":[1]}]}\n\n'

    assert event.replace(b"[1]", b"null") == reply.feed(event)


def test_a_chunk_that_cannot_be_accumulated_is_forwarded_and_flags_the_step():
    """Its text is not a string; the text of the other chunks is recorded."""
    reply = StreamResponse(ClientView(DIALECTS["/v1/completions"], ENGINES["vllm"], StripRules(), 1))
    event = b'data: {"choices":[{"index":0,"text":7}]}\n\n'

    assert reply.feed(event) == b""  # withheld: it may finish the choice
    end, response = reply.finish()
    assert event == end
    assert (response.response["choices"][0]["text"], response.problems) == ("", ("unparsed_event",))
