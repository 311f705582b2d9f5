"""Text to ids and back."""

from importlib.resources import files

from hypothesis import example, given
from hypothesis import strategies as st

from proxy.simulator.tokenizer import (
    ADDED,
    NAMED,
    SPECIAL,
    Decoder,
    Tokenizer,
    load_tokenizer,
    load_vocabulary,
    split_words,
)

TOKENIZER = load_tokenizer()
TEXTS = st.lists(st.one_of(st.text(), st.sampled_from([*NAMED, "the object", " \n\n\t ", "don't", "x" * 60]))).map(
    "".join
)


@given(TEXTS)
@example("¼² ٣ é\u0301 \u00a0\u2028\ufffd 🦊 漢字")
def test_decoding_undoes_encoding(text):
    """Any text that UTF-8 can carry comes back whole."""
    assert text == TOKENIZER.decode(TOKENIZER.encode(text))


@given(TEXTS)
def test_words_joined_are_the_text(text):
    """Cutting into words loses and adds nothing."""
    assert text == "".join(split_words(text))


def test_a_full_cache_changes_nothing(monkeypatch):
    """Words that no longer fit into the cache are encoded all the same."""
    monkeypatch.setattr("proxy.simulator.tokenizer._CACHED_WORDS", 0)

    assert TOKENIZER.encode(" object") == Tokenizer(load_vocabulary()["merges"]).encode(" object")


def test_named_tokens_are_one_id():
    """Special and added tokens are one id each, wherever they stand in a text."""
    ids = TOKENIZER.encode("a<|im_start|>b<tool_call>")

    assert [TOKENIZER.id("<|im_start|>"), TOKENIZER.id("<tool_call>")] == [ids[1], ids[3]]


def test_common_words_are_one_id():
    """A word that is frequent in the training text is one token with its space."""
    assert [TOKENIZER.decode([i]) for i in TOKENIZER.encode(" object is the")] == [" object", " is", " the"]


def test_a_long_word_takes_no_longer():
    """Encoding is linear: even a text without any boundary is cut."""
    assert max(map(len, split_words("a" * 100_000))) == 24


def test_the_vocabulary_is_small():
    """The vocabulary file is less than 100 kB and its 2,048 ids are all there."""
    assert len(TOKENIZER) == 2_048
    assert files("proxy.simulator").joinpath("vocabulary.json").stat().st_size < 100_000


def test_special_tokens_can_be_left_out():
    """`skip_special` leaves out the special tokens, and none of the added ones."""
    ids = TOKENIZER.encode("".join(SPECIAL) + "x" + "".join(ADDED))

    assert "x" + "".join(ADDED) == TOKENIZER.decode(ids, skip_special=True)


@given(TEXTS.filter(lambda text: not text.endswith("\ufffd")))
def test_decoding_one_by_one_gives_the_same_text(text):
    """Fed one id at a time, the decoder gives the same text."""
    ids = TOKENIZER.encode(text)
    decoder = Decoder(TOKENIZER)
    fed = "".join([decoder.feed(token) for token in ids])

    assert TOKENIZER.decode(ids, skip_special=True).rstrip("\ufffd") == fed.rstrip("\ufffd")


def test_a_split_character_is_told_by_its_last_token():
    """The tokens that begin a character have the string "", the last one has the whole character."""
    decoder = Decoder(TOKENIZER)
    told = [(decoder.string(token), decoder.feed(token)) for token in "🦊".encode()]

    assert told == [("", ""), ("", ""), ("", ""), ("🦊", "🦊")]


def test_what_is_no_character_shows_with_the_next_one():
    """Bytes that are no character become U+FFFD before the next text, but not in its token's string."""
    decoder = Decoder(TOKENIZER)
    told = [(decoder.string(token), decoder.feed(token)) for token in b"\xf9or"]

    assert told == [("", ""), ("o", "\ufffdo"), ("r", "r")]


def test_a_character_after_a_broken_one_is_whole():
    """A split character that follows broken bytes has its own string."""
    decoder = Decoder(TOKENIZER)
    told = [(decoder.string(token), decoder.feed(token)) for token in b"\xf9" + "é".encode()]

    assert told == [("", ""), ("", ""), ("é", "\ufffdé")]
