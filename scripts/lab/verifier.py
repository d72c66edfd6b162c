"""The real clock's verifier: a recorded target behind the real server, paced to a floor, in a process of its own.

    python -m paceline.scripts.lab.verifier JOB.json

The job says what was recorded, which vocabulary, where to listen and on which core. It ends with its standard input.
"""

import asyncio
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from paceline.cloud.engines.replay import ReplayEngine
from paceline.cloud.serve import Settings, serve
from paceline.protocol.codec import convert
from paceline.protocol.sampling import Sampling
from paceline.protocol.vocabulary import Vocabulary
from paceline.scripts.local import when_stdin_ends


def pin(core: int | None) -> None:
    """Keep this process on one core, where the system lets one."""
    if core is not None and hasattr(os, "sched_setaffinity"):
        with suppress(OSError):
            os.sched_setaffinity(0, {core})


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    pin(job["verifier_core"])
    sampling = convert(job["sampling"], Sampling, "sampling parameters")
    recordings = {(tuple(case["prompt"]), sampling): tuple(case["text"]) for case in job["cases"]}
    engine = ReplayEngine(job["target"], Vocabulary(**job["vocabulary"]), recordings)
    settings = Settings(engine="replay", host=sys.argv[2], port=0, verify_floor=job["verify"], width=job["width"])
    asyncio.run(serve(settings, engine, None, lambda address: print(address, flush=True), watch=when_stdin_ends))


if __name__ == "__main__":
    main()
