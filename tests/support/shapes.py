"""The shapes of rollouts as one literal table: the steps of each, and the expected tree and rows.

`tests/trajectory/test_shapes.py` asserts it, and docs/trajectories.md shows it.
"""

from dataclasses import dataclass

from tests.support.forests import make_choice, make_step

from proxy.trajectory.step import Step

EOS = 9
TWIN = {"extra": {"request_key": "same"}}
LOST = {"delivered": False, **TWIN}


@dataclass(frozen=True, slots=True)
class Counted:
    """The counts of a shape's tree and rows. `total` is the length of all rows together."""

    nodes: int
    roots: int
    leaves: int
    superseded: int
    sequences: int
    trained: int
    total: int


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of a rollout.

    `paths` are the tree: the steps from a root to each leaf, the oldest leaf first. `rows` are the sequences; a step in
    brackets is context there, trained in another row. `a.1` is the second choice of the step `a`.
    """

    name: str
    meaning: str
    steps: tuple[Step, ...]
    paths: tuple[str, ...]
    rows: tuple[str, ...]
    counted: Counted


def turn(*ids: int, finish: str = "stop", index: int = 0):
    """Return the sampled ids of one turn."""
    return make_choice(index, ids, finish_reason=finish)


# A thousand turns: each adds two ids of an observation and samples two.
_LONG = tuple(
    make_step(f"{number:04}", range(number * 4 + 2), turn(number * 4 + 2, number * 4 + 3)) for number in range(1000)
)
_LONG_PATH = " ".join(step.step_id for step in _LONG)

SHAPES = (
    Shape(
        "linear",
        "Three turns, each continuing the previous one.",
        (
            make_step("a", [1, 2], turn(10, EOS)),
            make_step("b", [1, 2, 10, EOS, 3], turn(20, 21, EOS)),
            make_step("c", [1, 2, 10, EOS, 3, 20, 21, EOS, 4], turn(30, EOS)),
        ),
        paths=("a b c",),
        rows=("a b c",),
        counted=Counted(nodes=3, roots=1, leaves=1, superseded=0, sequences=1, trained=7, total=11),
    ),
    Shape(
        "tool loop",
        "The model calls a tool twice, gets its results, and answers.",
        (
            make_step("a", [1], turn(10, 11, EOS, finish="tool_calls")),
            make_step("b", [1, 10, 11, EOS, 50, 51, 52], turn(12, EOS, finish="tool_calls")),
            make_step("c", [1, 10, 11, EOS, 50, 51, 52, 12, EOS, 53], turn(13, EOS)),
        ),
        paths=("a b c",),
        rows=("a b c",),
        counted=Counted(nodes=3, roots=1, leaves=1, superseded=0, sequences=1, trained=7, total=12),
    ),
    Shape(
        "parallel tool calls",
        "One turn calls two tools in parallel; both results are in one prompt.",
        (
            make_step("a", [1], turn(10, 11, 12, 13, EOS, finish="tool_calls")),
            make_step("b", [1, 10, 11, 12, 13, EOS, 50, 51], turn(20, EOS)),
        ),
        paths=("a b",),
        rows=("a b",),
        counted=Counted(nodes=2, roots=1, leaves=1, superseded=0, sequences=1, trained=7, total=10),
    ),
    Shape(
        "parallel calls",
        "After one turn the agent makes three parallel calls with different last messages, and continues one of them.",
        (
            make_step("a", [1], turn(10, EOS)),
            make_step("b", [1, 10, EOS, 2], turn(20, EOS)),
            make_step("c", [1, 10, EOS, 3], turn(30, 31, EOS)),
            make_step("d", [1, 10, EOS, 4], turn(40, EOS)),
            make_step("e", [1, 10, EOS, 3, 30, 31, EOS, 5], turn(60, EOS)),
        ),
        paths=("a b", "a d", "a c e"),
        rows=("a b", "(a) d", "(a) c e"),
        counted=Counted(nodes=5, roots=1, leaves=3, superseded=0, sequences=3, trained=11, total=22),
    ),
    Shape(
        "parallel samples",
        "Two calls with the same body, both delivered, neither continued: neither is known to be a retry, so both stay.",
        (make_step("a", [1, 2], turn(10, EOS), **TWIN), make_step("b", [1, 2], turn(20, 21, EOS), **TWIN)),
        paths=("a", "b"),
        rows=("a", "b"),
        counted=Counted(nodes=2, roots=2, leaves=2, superseded=0, sequences=2, trained=5, total=9),
    ),
    Shape(
        "sub-agents",
        "A planner and two sub-agents with their own system prompts; the planner's next prompt has their reports.",
        (
            make_step("a", [1, 100], turn(10, EOS)),
            make_step("b", [1, 200, 2], turn(20, EOS)),
            make_step("c", [1, 300, 3], turn(30, EOS)),
            make_step("d", [1, 200, 2, 20, EOS, 4], turn(21, EOS)),
            make_step("e", [1, 100, 10, EOS, 21, 30], turn(11, EOS)),
        ),
        paths=("c", "b d", "a e"),
        rows=("c", "b d", "a e"),
        counted=Counted(nodes=5, roots=3, leaves=3, superseded=0, sequences=3, trained=10, total=21),
    ),
    Shape(
        "compaction",
        "The history is replaced by a summary that the model wrote, which is then continued.",
        (
            make_step("a", [1], turn(10, EOS)),
            make_step("b", [1, 10, EOS, 2], turn(20, EOS)),
            make_step("c", [1, 10, EOS, 2, 20, EOS, 99], turn(70, 71, EOS)),
            make_step("d", [1, 70, 71, 3], turn(30, EOS)),
            make_step("e", [1, 70, 71, 3, 30, EOS, 4], turn(40, EOS)),
        ),
        paths=("a b c", "d e"),
        rows=("a b c", "d e"),
        counted=Counted(nodes=5, roots=2, leaves=2, superseded=0, sequences=2, trained=11, total=19),
    ),
    Shape(
        "retry of the last call",
        "The last response did not reach the agent, which retried and stopped.",
        (
            make_step("a", [1], turn(10, EOS)),
            make_step("b", [1, 10, EOS, 2], turn(20, EOS), **LOST),
            make_step("c", [1, 10, EOS, 2], turn(30, EOS), **TWIN),
        ),
        paths=("a b", "a c"),
        rows=("a c",),
        counted=Counted(nodes=3, roots=1, leaves=2, superseded=1, sequences=1, trained=4, total=6),
    ),
    Shape(
        "retry, then continued",
        "A call was retried although both responses seemed delivered, and the agent continued the second.",
        (
            make_step("a", [1], turn(10, EOS), **TWIN),
            make_step("b", [1], turn(20, EOS), **TWIN),
            make_step("c", [1, 20, EOS, 2], turn(30, EOS)),
        ),
        paths=("a", "b c"),
        rows=("b c",),
        counted=Counted(nodes=3, roots=2, leaves=2, superseded=1, sequences=1, trained=4, total=6),
    ),
    Shape(
        "retry that is marked",
        "The client marks its second and third attempt as retries; the first two seemed delivered.",
        (
            make_step("a", [1, 2], turn(10, EOS), extra={"request_key": "same"}),
            make_step("b", [1, 2], turn(20, EOS), extra={"request_key": "same", "attempt": 1, "retry_of": "a"}),
            make_step("c", [1, 2], turn(30, EOS), extra={"request_key": "same", "attempt": 2}),
        ),
        paths=("a", "b", "c"),
        rows=("c",),
        counted=Counted(nodes=3, roots=3, leaves=3, superseded=2, sequences=1, trained=2, total=4),
    ),
    Shape(
        "rollback by one turn",
        "The agent removes its last turn and sends another message instead.",
        (
            make_step("a", [1], turn(10, EOS)),
            make_step("b", [1, 10, EOS, 2], turn(20, EOS)),
            make_step("c", [1, 10, EOS, 3], turn(30, 31, EOS)),
        ),
        paths=("a b", "a c"),
        rows=("a b", "(a) c"),
        counted=Counted(nodes=3, roots=1, leaves=2, superseded=0, sequences=2, trained=7, total=13),
    ),
    Shape(
        "rollback by several turns",
        "The agent removes two turns and continues the first one in another way.",
        (
            make_step("a", [1], turn(10, EOS)),
            make_step("b", [1, 10, EOS, 2], turn(20, EOS)),
            make_step("c", [1, 10, EOS, 2, 20, EOS, 3], turn(30, EOS)),
            make_step("d", [1, 10, EOS, 4], turn(40, EOS)),
            make_step("e", [1, 10, EOS, 4, 40, EOS, 5], turn(50, EOS)),
        ),
        paths=("a b c", "a d e"),
        rows=("a b c", "(a) d e"),
        counted=Counted(nodes=5, roots=1, leaves=2, superseded=0, sequences=2, trained=10, total=18),
    ),
    Shape(
        "edited history",
        "The agent edits the model's reply and continues: the prompt contains no complete turn of the model.",
        (
            make_step("a", [1], turn(10, 11, 12, EOS)),
            make_step("b", [1, 10, 99, 12, EOS, 2], turn(20, EOS)),
            make_step("c", [1, 10, 99, 12, EOS, 2, 20, EOS, 3], turn(30, EOS)),
        ),
        paths=("a", "b c"),
        rows=("a", "b c"),
        counted=Counted(nodes=3, roots=2, leaves=2, superseded=0, sequences=2, trained=8, total=16),
    ),
    Shape(
        "n > 1, one choice continued",
        "Three choices of one call; the agent continues the second, and the others remain separate rows.",
        (
            make_step("a", [1, 2], turn(10, EOS), turn(11, 12, EOS, index=1), turn(13, EOS, index=2)),
            make_step("b", [1, 2, 11, 12, EOS, 3], turn(20, EOS)),
        ),
        paths=("a", "a.2", "a.1 b"),
        rows=("a", "a.2", "a.1 b"),
        counted=Counted(nodes=4, roots=3, leaves=3, superseded=0, sequences=3, trained=9, total=16),
    ),
    Shape(
        "truncated turn continued",
        "A turn reached its token limit; the next call has it as its prompt, with nothing in between.",
        (
            make_step("a", [1], turn(10, 11, 12, finish="length")),
            make_step("b", [1, 10, 11, 12], turn(13, 14, EOS)),
        ),
        paths=("a b",),
        rows=("a b",),
        counted=Counted(nodes=2, roots=1, leaves=1, superseded=0, sequences=1, trained=6, total=7),
    ),
    Shape(
        "empty completion",
        "The model ends its turn at once: the EOS is the only sampled token, and it is trained.",
        (
            make_step("a", [1], turn(10, EOS)),
            make_step("b", [1, 10, EOS, 2], turn(EOS)),
            make_step("c", [1, 10, EOS, 2, EOS, 3], turn(20, EOS)),
        ),
        paths=("a b c",),
        rows=("a b c",),
        counted=Counted(nodes=3, roots=1, leaves=1, superseded=0, sequences=1, trained=5, total=8),
    ),
    Shape(
        "identical samples",
        "Two calls with different seeds sampled the same ids: both are trained, and the next step has one parent.",
        (
            make_step("a", [1], turn(10, EOS)),
            make_step("b", [1], turn(10, EOS)),
            make_step("c", [1, 10, EOS, 2], turn(20, EOS)),
        ),
        paths=("b", "a c"),
        rows=("b", "a c"),
        counted=Counted(nodes=3, roots=2, leaves=2, superseded=0, sequences=2, trained=6, total=9),
    ),
    Shape(
        "a thousand steps",
        "One conversation of a thousand turns.",
        _LONG,
        paths=(_LONG_PATH,),
        rows=(_LONG_PATH,),
        counted=Counted(nodes=1000, roots=1, leaves=1, superseded=0, sequences=1, trained=2000, total=4000),
    ),
    Shape(
        "several replicas",
        "Two replicas with different clocks alternate: the order of step IDs is wrong (m1, k2, m3, k4).",
        (
            make_step("k4", [1, 10, EOS, 2, 20, EOS, 3, 30, EOS, 4], turn(40, EOS)),
            make_step("m1", [1], turn(10, EOS)),
            make_step("m3", [1, 10, EOS, 2, 20, EOS, 3], turn(30, EOS)),
            make_step("k2", [1, 10, EOS, 2], turn(20, EOS)),
            make_step("k5", [1, 10, EOS, 2, 20, EOS, 5], turn(50, EOS)),
        ),
        paths=("m1 k2 m3 k4", "m1 k2 k5"),
        rows=("m1 k2 m3 k4", "(m1) (k2) k5"),
        counted=Counted(nodes=5, roots=1, leaves=2, superseded=0, sequences=2, trained=10, total=21),
    ),
)
