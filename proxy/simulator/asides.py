"""What clients ask of an engine beside sampling: ids of a text, text of ids, another label for the weights.

Holds the reading of these small bodies, which both shapes share; it must not hold their answers, which differ.
"""

from proxy.simulator.chat import rendered
from proxy.simulator.faults import bad_value, missing
from proxy.simulator.history import prepare_for_vllm
from proxy.simulator.requests import Body, Prepare, read_chat


def text_to_tokenize(body: Body, prepare: Prepare = prepare_for_vllm) -> str:
    """The text of a prompt or of rendered messages."""
    if "messages" in body:
        return rendered(read_chat(body, prepare))
    if isinstance(body.get("prompt"), str):
        return str(body["prompt"])
    raise bad_value("Give a prompt that is a string, or messages.", "prompt")


def ids_to_detokenize(body: Body) -> list[int]:
    """The ids of a request for their text."""
    ids = body.get("tokens")
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise bad_value("Give tokens that are a list of ids.", "tokens")
    return ids


def new_version(body: Body) -> str:
    """The label that a request gives the weights."""
    version = body.get("new_version")
    if not isinstance(version, str):
        raise missing("body.new_version")
    return version
