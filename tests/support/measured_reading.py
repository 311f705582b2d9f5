"""A process that reads a large rollout and says what it took: the growth of its resident memory in MB, and bytes handed out.

Run as `python measured_reading.py growing|wide FORMAT STEPS TOKENS`. What is stored is made first, and not counted.
"""

import random
import sys
from array import array
from dataclasses import replace
from pathlib import Path

from forests import make_step

from proxy.api.control.export_query import ExportQuery
from proxy.export import FORMATS, Fill
from proxy.export.containers import CONTAINERS
from proxy.trajectory.blocks import BlockReader
from proxy.trajectory.codec import decode, encode
from proxy.trajectory.facts import RolloutFacts
from proxy.trajectory.sequence import Options


def stored(kind, steps, tokens):
    """The records of a rollout and their blocks; each prompt goes on from the step before, or is one of its own."""
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
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident_mb("VmRSS")
    reader = BlockReader(blocks)
    read = [decode(record, reader, at, whole=False) for at, record in enumerate(records)]
    wanted = ExportQuery(FORMATS[name], CONTAINERS["json"], Options(), Fill())
    plan = wanted.form.plan(RolloutFacts("r1", reward=1.0), read, Options())
    pieces = list(wanted.pieces(plan.render(), {}))
    sys.stdout.write(f"{resident_mb('VmHWM') - before:.1f} {sum(map(len, pieces)) / 2**20:.1f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
