"""python -m paceline.scripts.chaos [virtual|kills|bytes|disks|manners|soak]: break everything that may break.

Counts the answers that suffered, and fails if one did. Without a name the first four run, one after the other.
"""

import argparse
import asyncio
import logging
import sys

from paceline.scripts.chaos.report import lines
from paceline.scripts.chaos.town import Plan, campaign

PARTS = ("virtual", "kills", "bytes", "disks")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", nargs="?", choices=[*PARTS, "manners", "soak"], help="one part alone")
    parser.add_argument("--cuts", type=int, default=2000, help="links to cut in virtual time, at least")
    parser.add_argument("--kills", type=int, default=200, help="real verifier processes to kill")
    parser.add_argument("--broken", type=int, default=1000, help="times to break the bytes of a real connection")
    parser.add_argument("--edges", type=int, default=20, help="real edge processes to kill while their disks are full")
    parser.add_argument("--gone", type=int, default=100, help="clients that vanish")
    parser.add_argument("--opens", type=int, default=10_000, help="sessions to be refused")
    parser.add_argument(
        "--rounds", type=int, default=5, help="times to compare a quiet client alone and beside loud ones"
    )
    parser.add_argument("--seconds", type=float, default=3600.0, help="of the soak")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # what is logged here was done on purpose
    if given.part == "soak":
        return _soak(given.seconds, given.seed)
    if given.part == "manners":
        return _manners(given.gone, given.opens, given.rounds)
    whole = [_part(part, given) for part in PARTS if given.part in (None, part)]
    return 0 if all(whole) else 1


def _part(part: str, given: argparse.Namespace) -> bool:
    from paceline.scripts.chaos.disks import filling
    from paceline.scripts.chaos.kills import killing
    from paceline.scripts.chaos.rubble import breaking

    match part:
        case "virtual":
            return virtual(given.cuts, given.seed)
        case "kills":
            faults, tally = killing(given.kills, given.seed)
        case "bytes":
            faults, tally = breaking(given.broken, given.seed)
        case _:
            faults, tally = filling(given.edges, given.seed)
    print(lines(f"real processes, {part}", faults, tally), flush=True)
    return tally.whole


def virtual(cuts: int, seed: int) -> bool:
    """Campaigns of 200 answers until so many links were cut. True if no answer suffered."""
    done, whole = 0, True
    while done < cuts:
        town = campaign(Plan(200, seed))
        print(lines(f"virtual time, seed {seed}", town.faults.done, town.tally, town.faults.cuts), flush=True)
        done, seed, whole = done + town.faults.done["cut"], seed + 1, whole and town.tally.whole
    print(f"{done} cuts", flush=True)
    return whole


def _manners(clients: int, opens: int, rounds: int) -> int:
    from paceline.scripts.chaos.manners import report

    said, passed = asyncio.run(report(clients, opens, rounds))
    print("\n".join(said), flush=True)
    return 0 if passed else 1


def _soak(seconds: float, seed: int) -> int:
    from paceline.scripts.chaos.soak import soak

    made = asyncio.run(soak(seconds, seed, tell=lambda line: print(line, flush=True)))
    print("\n".join(made.lines()), flush=True)
    return 0 if made.passed else 1


if __name__ == "__main__":
    sys.exit(main())
