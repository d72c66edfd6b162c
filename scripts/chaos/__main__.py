"""python -m paceline.scripts.chaos: break everything that may break, and count the answers that suffered. Fails if one did."""

import argparse
import logging
import sys

from paceline.scripts.chaos.report import lines
from paceline.scripts.chaos.town import Plan, campaign


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=2000, help="links to cut in virtual time, at least")
    parser.add_argument("--kills", type=int, default=200, help="real verifier processes to kill")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.disable(logging.WARNING)  # what is logged here was done on purpose
    whole = virtual(given.cuts, given.seed)
    if given.kills:
        from paceline.scripts.chaos.kills import killing

        faults, tally = killing(given.kills, given.seed)
        print(lines("real processes", faults, tally), flush=True)
        whole = whole and tally.whole
    return 0 if whole else 1


def virtual(cuts: int, seed: int) -> bool:
    """Campaigns of 200 answers until so many links were cut. True if no answer suffered."""
    done, whole = 0, True
    while done < cuts:
        town = campaign(Plan(200, seed))
        print(lines(f"virtual time, seed {seed}", town.faults.done, town.tally, town.faults.cuts), flush=True)
        done, seed, whole = done + town.faults.done["cut"], seed + 1, whole and town.tally.whole
    print(f"{done} cuts", flush=True)
    return whole


if __name__ == "__main__":
    sys.exit(main())
