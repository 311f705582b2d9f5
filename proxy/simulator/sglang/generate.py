"""Answers of SGLang's own `/generate`: text or ids in, ids and `meta_info` out.

Holds the prompts and the answers of that endpoint; it must not hold sockets. Shapes were read off the source of
SGLang 0.5.23 (`managers/tokenizer_manager.py:2505-2712`), those of `meta_info` off its recorded chat answers.

Rule 1: a stream is cumulative: each event holds all of its choice so far.
Rule 2: logprobs of the prompt are those of the model, without temperature; those of samples are after it.
Rule 3: `max_new_tokens` 0 only reads the prompt. One token is sampled all the same, and told to nobody.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.simulator.distribution import Prefix, prefix_of
from proxy.simulator.generation import Token
from proxy.simulator.model import Manner, Model
from proxy.simulator.options import Options
from proxy.simulator.requests import Common
from proxy.simulator.sglang.requests import Native, refused, sglang_room
from proxy.simulator.sglang.wire import Behind, Pair, Scoring, experts, output_logprobs
from proxy.simulator.wire import Answer, event


@dataclass(frozen=True, slots=True)
class NativePrompt:
    """One prompt: its ids, and how much room its reply has."""

    ids: Sequence[int]
    manner: Manner


def native_prompts(asked: Native, common: Common, model: Model, options: Options) -> list[NativePrompt]:
    """The prompts of a request; refuses ids that are no tokens, and what does not fit the model's window."""
    prompts = []
    for prompt in asked.prompts:
        ids = model.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        model.check_ids(ids)
        if not ids:
            raise refused("The prompt must not be empty.")
        room = sglang_room(len(ids), max(common.max_tokens or 0, 1), common, options)
        prompts.append(NativePrompt(ids, Manner(room)))
    if not prompts:
        raise refused("The prompt must not be empty.")
    return prompts


@dataclass(slots=True)
class NativeReply:
    """One such answer in the making; see `wire.Reply`. Choice `i` belongs to prompt `i // n`."""

    asked: Native
    common: Common
    model: Model
    options: Options
    asked_prompts: Sequence[NativePrompt]
    scoring: Scoring
    behind: Behind
    _tokens: list[list[Token]] = field(init=False)
    _scored: dict[int, list[Pair]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tokens = [[] for _ in range(len(self.asked_prompts) * self.common.samples)]

    @property
    def prompts(self) -> Sequence[tuple[Prefix, Manner]]:
        """The prompts, in the order of the request."""
        return [(prefix_of(prompt.ids), prompt.manner) for prompt in self.asked_prompts]

    def opening(self) -> list[bytes]:
        """Nothing: there is no role."""
        return []

    def events(self, index: int, token: Token) -> list[bytes]:
        """All of a choice so far."""
        self._tokens[index].append(token)
        answer = self._answer(index, self._tokens[index])
        return [event(answer | {"index": index} if self._is_list else answer)]

    def closing(self) -> list[bytes]:
        """Nothing: all was told."""
        return []

    def whole(self, choices: Sequence[Sequence[Token]]) -> Answer | list[Answer]:
        """The one answer, or a list of several."""
        answers = [self._answer(index, tokens) for index, tokens in enumerate(choices)]
        return answers if self._is_list else answers[0]

    @property
    def _is_list(self) -> bool:
        return self.asked.is_batch or self.common.samples > 1

    def _answer(self, index: int, sampled: Sequence[Token]) -> Answer:
        tokens = [] if self.common.max_tokens == 0 else sampled
        place = index // self.common.samples
        answer: Answer = {
            "text": "".join(token.text for token in tokens),
            "output_ids": [token.id for token in tokens],
        }
        if self.asked.return_prompt_token_ids:
            answer["prompt_token_ids"] = self.asked_prompts[place].ids
        return answer | {"meta_info": self._meta_info(place, tokens)}

    def _meta_info(self, place: int, tokens: Sequence[Token]) -> Answer:
        prompt = self.asked_prompts[place].ids
        meta = self.behind.meta_info(prompt, tokens)
        if self.asked.return_logprob:
            count, with_text = self.asked.top_logprobs_num or 0, bool(self.asked.return_text_in_logprobs)
            meta["input_token_logprobs"] = self._of_prompt(place, with_text=with_text)
            meta |= output_logprobs(self.scoring, tokens, count, with_text=with_text)
        if self.asked.return_routed_experts and self.options.routed_experts:
            meta["routed_experts"] = experts(prompt, tokens)
        return meta

    def _of_prompt(self, place: int, *, with_text: bool) -> list[Pair]:
        """The logprobs of a prompt from where they were asked; the first of them is null, wherever it stands."""
        start = self.asked.logprob_start_len
        if start is None or start < 0:
            return []
        if place not in self._scored:
            prompt = self.asked_prompts[place].ids
            logprobs = [None, *[scores[0].logprob for scores in self.model.prompt_scores(prompt, 0)]]
            self._scored[place] = [
                [logprob if at else None, token, self.scoring.text(token) if with_text else None]
                for at, (logprob, token) in enumerate(zip(logprobs[start:], prompt[start:], strict=True))
            ]
        return self._scored[place]
