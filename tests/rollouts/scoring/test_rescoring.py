"""The scores of rows: of one set of weights, of each trained token once, and from the cache."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from tests.support.fakes import settings_for
from tests.support.forests import forests, make_choice, make_step

from proxy.errors import Conflict, EngineBusy
from proxy.protocols.engines import ENGINES
from proxy.rollouts.policy import PAUSE_ANNOUNCEMENT, POLICY_ANNOUNCEMENT
from proxy.rollouts.scoring.requests import Kept, TokenScores
from proxy.rollouts.scoring.rescoring import (
    POLICY,
    Rescorers,
    ScoreCache,
    ScoringEngines,
    ScoringLimits,
    differing_id,
    is_unlikely,
)
from proxy.telemetry.metrics import make_metrics
from proxy.trajectory.arrays import pack_mask
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options, sequences
from proxy.upstream.client import Upstream

FACTS = RolloutFacts("r1", "g1", "completed")
STEPS = [make_step("a", [1, 2], [3, 4]), make_step("b", [1, 2, 3, 4, 5], [6])]


class FakeEngines(ScoringEngines):
    """Engines that return for each position the negated id in 1,024ths, and call `on_score` first."""

    def __init__(self, upstream, *, on_score=None, version="t1", **options) -> None:
        super().__init__(upstream, ScoringLimits(configured=3), version=version, **options)
        self.on_score = on_score
        self.scored = []
        self.values = None
        self.uncertain = 0

    async def find_model(self):
        return None if self.is_policy else "big"

    async def score(self, model, ids, positions, top_k, masks):
        self.scored.append((model, list(ids), list(positions)))
        if self.on_score is not None:
            await self.on_score(len(self.scored))
        await asyncio.sleep(0)
        self.masks = masks
        logprobs = self.values or [-ids[position] / 1024 for position in positions]
        return self.upstream.endpoints[0], TokenScores(logprobs, uncertain=self.uncertain)


@pytest.fixture
async def upstream(engine):
    opened = Upstream(settings_for(engine.url).engines, make_metrics(CollectorRegistry()))
    yield opened
    await opened.close()


def rescorers_of(store, engines, lifetime_s=60):
    async def no_text(engine, ids):
        return None

    name = POLICY if engines.is_policy else "teacher"
    return Rescorers({name: engines}, ScoreCache(store, lifetime_s, 2**20), no_text)


async def scored_by(store, engines, steps=STEPS, options=Options()):  # noqa: B008 - it is frozen
    rescorers = rescorers_of(store, engines)
    rescoring = await rescorers.begin(POLICY if engines.is_policy else "teacher", 0)
    return await rescoring.score(FACTS, steps, options)


class NoCache:
    """A store with an empty cache."""

    def __init__(self) -> None:
        self.cache = self

    async def get(self, name):
        return None

    async def put(self, name, value, **limits):
        pass


class OneEndpoint:
    """An upstream of one engine without texts."""

    class Endpoint:
        label = "e"
        kind = "plain"
        engine = ENGINES[kind]

    endpoints = (Endpoint(),)

    async def ensure_detected(self, endpoint):
        pass


@given(forests(), st.sampled_from(["all", "longest", "last"]), st.sampled_from([None, 6]))
async def test_each_trained_token_is_scored_once_after_the_ids_before_it(steps, branches, max_len):
    """Each row is one request with its ids up to the last trained one; the scores are in the order of the tokens."""
    options = Options(branches=branches, max_len=max_len)
    rows = list(sequences(steps, FACTS, options).each())
    engines = FakeEngines(OneEndpoint())
    if any(row.trained[0] for row in rows):
        with pytest.raises(Conflict, match="no prompt before its first sampled token"):
            await scored_by(NoCache(), engines, steps, options)
        return
    scores = await scored_by(NoCache(), engines, steps, options)

    assert len(rows) == len(scores) == len(engines.scored)
    for row, found in zip(rows, scores, strict=True):
        trained = [at for at, bit in enumerate(row.mask) if bit]
        assert ("big", row.token_ids[: trained[-1] + 1], trained) in engines.scored
        assert [-row.token_ids[at] / 1024 if bit else None for at, bit in enumerate(row.mask)] == found.filled(
            row.mask, None
        )


@pytest.mark.parametrize("is_policy", [True, False])
async def test_scores_of_a_policy_are_over_the_tokens_that_sampling_kept(store, upstream, is_policy):
    """A teacher's scores are over all tokens. A row is refused if the engine does not return its tokens."""
    masked = make_choice(0, [3, 4], sampling_mask=pack_mask([[3, 9], [4]]))
    sampling = {"temperature": 0.5, "logprobs_mode": "processed_logprobs"}
    engines = FakeEngines(upstream, is_policy=is_policy)
    await scored_by(store, engines, [make_step("a", [1, 2], masked, sampling=sampling)])

    assert ({2: Kept([3, 9], 0.5), 3: Kept([4], 0.5)} if is_policy else {}) == dict(engines.masks)
    if not is_policy:
        return
    engines.uncertain = 1
    with pytest.raises(Conflict, match="not return enough of the tokens that sampling kept, at 1 positions"):
        await scored_by(store, engines, [make_step("a", [1, 2], masked, sampling=sampling)])


async def test_scores_are_cached_by_ids_model_and_version(store, upstream):
    """Other ids, and another version of the scorer, are scored; a full store is no error."""
    engines = FakeEngines(upstream)
    first, again = await scored_by(store, engines), await scored_by(store, engines)
    engines.version = "t2"
    other = await scored_by(store, engines)
    await scored_by(store, engines, STEPS[:1])

    assert first == again
    assert (first[0].policy_version, other[0].policy_version) == ("t1", "t2")
    assert len(engines.scored) == 3


async def test_scores_of_a_policy_are_cached_by_its_epoch(store, upstream):
    """Equal versions of two epochs have different weights. The first epoch's scores keep the name that predates epochs."""
    engines = FakeEngines(upstream, is_policy=True)
    for value in (b'"8"', b'{"version":"8","epoch":1}', b'{"version":"8","epoch":1,"run":"a"}'):
        await store.announcements.announce(POLICY_ANNOUNCEMENT, value)
        await scored_by(store, engines)

    assert len(engines.scored) == 2


async def test_scores_of_a_scorer_without_a_version_are_not_cached(store, upstream):
    """Its weights may have been replaced."""
    engines = FakeEngines(upstream)
    engines.version = None
    for _ in range(2):
        await scored_by(store, engines)

    assert len(engines.scored) == 2


async def test_a_policy_is_scored_again_if_its_weights_change_meanwhile(store, upstream):
    """The result has the version of the scores; scores are cached only if a version is announced."""

    async def announce(count):
        if count == 3:
            await store.announcements.announce(POLICY_ANNOUNCEMENT, b'"8"')

    engines = FakeEngines(upstream, on_score=announce, is_policy=True)
    (unknown,) = await scored_by(store, engines)
    await scored_by(store, engines)
    (found,) = await scored_by(store, engines)
    await scored_by(store, engines)

    assert (unknown.policy_version, found.policy_version) == (None, "8")
    assert len(engines.scored) == 4
    assert {model for model, _, _ in engines.scored} == {"policy"}


async def test_scores_in_a_pause_are_not_cached(store, upstream):
    """The weights may be newer than the announced version. A pause that began before is no change."""
    await store.announcements.announce(POLICY_ANNOUNCEMENT, b'"8"')
    await store.announcements.announce(PAUSE_ANNOUNCEMENT, b'"wait"')
    engines = FakeEngines(upstream, is_policy=True)
    for _ in range(2):
        (paused,) = await scored_by(store, engines)
    await store.announcements.announce(PAUSE_ANNOUNCEMENT, b"null")
    for _ in range(2):
        (resumed,) = await scored_by(store, engines)

    assert (paused.policy_version, resumed.policy_version, len(engines.scored)) == ("8", "8", 3)


async def test_weights_that_change_all_the_time_are_an_error(store, upstream):
    async def announce(count):
        await store.announcements.announce(POLICY_ANNOUNCEMENT, b'"%d"' % count)

    with pytest.raises(EngineBusy, match="weights of the policy changed"):
        await scored_by(store, FakeEngines(upstream, on_score=announce, is_policy=True))


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), 0.5, -9999.0])
async def test_values_that_are_no_logprobs_are_refused(store, upstream, value):
    """-9999 is vLLM's value for a probability of 0."""
    engines = FakeEngines(upstream)
    engines.values = [-0.5, value, -0.5]
    with pytest.raises(Conflict, match="no finite logprob") as refused:
        await scored_by(store, engines)

    assert refused.value.reason == "not_scored"


async def test_a_failure_ends_the_scoring_of_the_other_rows(store, upstream):
    """It is raised as it is, and no request remains."""
    steps = [make_step(f"s{number}", [number + 1], [number + 10]) for number in range(20)]

    async def fail(count):
        if count == 2:
            raise EngineBusy("full")
        await asyncio.sleep(30)

    engines = FakeEngines(upstream, on_score=fail)
    with pytest.raises(EngineBusy, match="full"):
        await scored_by(store, engines, steps)

    assert len(engines.scored) <= 3


def test_the_representations_have_no_secrets(upstream):
    rescorers = rescorers_of(None, FakeEngines(upstream))

    assert repr(rescorers) == "<Rescorers teacher>"


async def test_a_row_with_images_is_refused(store, upstream):
    """Its ids without the images are another prompt."""
    engines = FakeEngines(upstream)
    images = {"extra": {"images": {"ids": ["0f" * 16], "token": 1}}}

    with pytest.raises(Conflict, match="rollout 'r1' cannot be scored: it has images"):
        await scored_by(store, engines, [make_step("a", [1, 2], [3], **images)])
    assert engines.scored == []


IDS = list(range(500, 900))


def texts(changed=frozenset(), missing=frozenset()):
    async def text_of(ids):
        (token,) = ids
        return None if token in missing else f" other{token}" if token in changed else f" t{token}"

    return text_of


async def test_equal_texts_are_one_vocabulary():
    """Spaces around a text are not compared."""

    async def stripped(ids):
        return f"t{ids[0]}"

    assert None is await differing_id(IDS, texts(), stripped)


@given(st.sets(st.sampled_from(IDS), min_size=390))
async def test_a_vocabulary_that_differs_in_most_ids_is_found(changed):
    """With an id that differs, and both texts."""
    token, own, other = await differing_id(IDS, texts(), texts(changed))

    assert (f" t{token}", f" other{token}") == (own, other)
    assert token in changed


@pytest.mark.parametrize("side", [0, 1])
async def test_engines_without_texts_cannot_be_compared(side):
    none = texts(missing=frozenset(IDS))
    with pytest.raises(LookupError):
        await differing_id(IDS, *((none, texts()) if side else (texts(), none)))


async def test_parts_of_characters_are_not_compared():
    async def broken(ids):
        return "\N{REPLACEMENT CHARACTER}"

    with pytest.raises(LookupError):
        await differing_id(IDS, broken, texts())


def test_scores_next_to_no_probability_are_of_other_tokens():
    """Few tokens are no evidence; nor are scores that a poor teacher gives."""
    assert is_unlikely([-1.0] * 20, [-12.0] * 20)
    assert not is_unlikely([-1.0] * 19, [-12.0] * 19)
    assert not is_unlikely([-1.0] * 20, [-8.0] * 20)
    assert not is_unlikely([], [-12.0] * 20)
