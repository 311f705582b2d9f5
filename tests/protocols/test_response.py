"""An engine's reply: the framings, and when the end begins. On recorded answers: test_exchange.py."""

import pytest

from proxy.protocols.dialects import DIALECTS
from proxy.protocols.engines import ENGINES, StripRules
from proxy.protocols.response import ClientView, RawResponse, StreamResponse, WholeResponse, response_stream_for


def view(choices: int | None = 1, **hidden) -> ClientView:
    return ClientView(DIALECTS["/v1/chat/completions"], ENGINES["vllm"], StripRules(**hidden), choices)


def chunk(index: int, finish: str = "null") -> bytes:
    return b'data: {"choices":[{"index":%d,"delta":{"content":"x"},"finish_reason":%s}]}\n\n' % (index, finish.encode())


@pytest.mark.parametrize(
    ("status", "content_type", "expected"),
    [
        (200, "application/json", WholeResponse),
        (200, "Application/JSON; charset=utf-8", WholeResponse),
        (200, "text/event-stream; charset=utf-8", StreamResponse),
        (200, "text/html", RawResponse),
        (200, "", RawResponse),
        (400, "application/json", RawResponse),
        (500, "text/event-stream", RawResponse),
    ],
)
def test_the_framing_decides_the_reply(status, content_type, expected):
    """Not what was asked for: an engine may answer otherwise."""
    assert expected is type(response_stream_for(status, content_type, view()))


def test_of_several_choices_the_last_to_finish_begins_the_end():
    """The others' finish reasons are shown as they come."""
    reply = StreamResponse(view(choices=2))
    first, second = chunk(1, '"stop"'), chunk(0, '"stop"')

    assert first == reply.feed(first)
    assert b"" == reply.feed(second)
    assert second == reply.finish()[0]


def test_where_nobody_knows_how_many_choices_come_the_first_finish_may_be_the_last():
    """Withholding too much is late; withholding too little breaks the order law."""
    reply = StreamResponse(view(choices=None))

    assert b"" == reply.feed(chunk(0, '"stop"') + chunk(1))


def test_a_cut_event_is_passed_on_at_the_end():
    """As the engine left it."""
    reply = StreamResponse(view())
    reply.feed(b'data: {"cho')
    end, answer = reply.finish()

    assert (b'data: {"cho', False, ("unparsed_event",)) == (end, answer.ended, answer.problems)


def test_comments_pass():
    """Keep-alives of the engine reach the client."""
    assert b": ping\n\n" == StreamResponse(view()).feed(b": ping\n\n")


def test_a_named_model_is_shown_by_the_clients_name():
    """In every event that names it; one that does not is left alone."""
    reply = StreamResponse(ClientView(DIALECTS["/v1/chat/completions"], ENGINES["vllm"], StripRules(), 1, "gpt-4o"))

    assert b'data: {"model":"gpt-4o","choices":[]}\n\n' == reply.feed(b'data: {"model":"m","choices":[]}\n\n')
    assert b'data: {"choices":[]}\n\n' == reply.feed(b'data: {"choices":[]}\n\n')


def test_nan_beside_hidden_fields_is_shown_as_it_came():
    """A loosely read event is written as loosely."""
    reply = StreamResponse(view(token_ids=True))
    event = b'data: {"choices":[{"index":0,"x":NaN,"token_ids":[1]}]}\n\n'

    assert event.replace(b"[1]", b"null") == reply.feed(event)


def test_a_response_of_another_shape_passes_and_is_an_error():
    """Choices that are no objects cannot be hidden from: nothing is guessed."""
    reply = WholeResponse(view(token_ids=True))
    reply.feed(b'{"choices":[1]}')
    end, answer = reply.finish()

    assert (b'{"choices":[1]}', None, ("unparsed_event",)) == (end, answer.response, answer.problems)


def test_a_chunk_that_cannot_be_joined_is_shown_as_it_came_and_flags_the_step():
    """What is no text cannot be joined; the other chunks are kept."""
    reply = StreamResponse(ClientView(DIALECTS["/v1/completions"], ENGINES["vllm"], StripRules(), 1))
    event = b'data: {"choices":[{"index":0,"text":7}]}\n\n'

    assert b"" == reply.feed(event)  # withheld: it may say that the choice is over
    end, answer = reply.finish()
    assert event == end
    assert ("", ("unparsed_event",)) == (answer.response["choices"][0]["text"], answer.problems)
