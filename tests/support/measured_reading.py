"""A process that reads a large rollout and prints the growth of its resident memory in MB, and the bytes returned.

Arguments: `growing|wide FORMAT STEPS TOKENS`. The rollout is stored before the measurement.
"""

import random
import sys
from array import array
from dataclasses import replace
from pathlib import Path

from tests.support.forests import make_step

from proxy.api.control.export_query import ExportQuery
from proxy.api.control.schemas import ExportOptions
from proxy.export import FORMATS, Fill
from proxy.export.containers import CONTAINERS
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import decode, encode
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options


def stored(kind, steps, tokens):
    """Return the records of a rollout and their blocks; prompts extend the previous step, or are unrelated."""
    draw, records, blocks, ids = random.Random(1), [], {}, array("i")
    for number in range(steps):
        fresh = array("i", draw.choices(range(150_000), k=tokens))
        ids = ids + fresh if kind == "growing" else fresh
        sampled = draw.choices(range(150_000), k=4)
        record = encode(replace(make_step(f"{number:06}", [], sampled), prompts=(ids,)), set(blocks))
        blocks.update(record.blocks)
        records.append(record.record)
        ids = ids + array("i", sampled)
    return records, blocks


def resident_mb(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def main(kind, name, steps, tokens):
    records, blocks = stored(kind, int(steps), int(tokens))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from here
    before = resident_mb("VmRSS")
    reader = BlockReader(blocks)
    read = [decode(record, reader, position, whole=False) for position, record in enumerate(records)]
    query = ExportQuery(FORMATS[name], CONTAINERS["json"], Options(), Fill(), ExportOptions())
    plan = query.form.plan(RolloutFacts("r1", reward=1.0), read, Options())
    pieces = list(query.pieces(plan.render(), {}))
    sys.stdout.write(f"{resident_mb('VmHWM') - before:.1f} {sum(map(len, pieces)) / 2**20:.1f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
