"""What a campaign did and what came of it, in lines."""

from collections import Counter
from collections.abc import Mapping

from paceline.scripts.chaos.answers import Tally


def lines(
    title: str, faults: Mapping[str, int], tally: Tally, cuts: Counter[tuple[str, str, str]] | None = None
) -> str:
    done = ", ".join(f"{count} {name}" for name, count in sorted(faults.items(), key=lambda f: -f[1]))
    said = [
        f"{title}: {sum(faults.values())} faults ({done})",
        f"  {tally.answers} answers, {tally.tokens} tokens, {tally.stopped} stopped on purpose",
        f"  {tally.altered} altered, {tally.lost} lost"
        + (f", {tally.crippled} stopped drafting" if tally.crippled else ""),
    ]
    said += [f"  {reason}" for reason in tally.reasons[:20]]
    if cuts:
        places = (f"{count} {when} {kind}" for (_, kind, when), count in sorted(cuts.items(), key=lambda c: -c[1]))
        said.append(f"  cuts: {', '.join(places)}")
    return "\n".join(said)
