"""`paceline bench link`: is the link what it was set to?"""

from typing import Annotated

import typer


def link(
    rtt: Annotated[str, typer.Option(help="Round trips in seconds, with commas between.")] = "0.01,0.025,0.05,0.1,0.2",
    bandwidth: Annotated[
        str, typer.Option(help="Mbit/s up/down, with commas between; 0: no limit.")
    ] = "0/0,5/20,20/100",
    via: Annotated[str, typer.Option(help="tun, proxy, or auto: TUN between two namespaces when root.")] = "auto",
    tolerance: Annotated[float, typer.Option(min=0.001, help="Share by which a figure may be off.")] = 0.05,
) -> None:
    """Set a round trip and a bandwidth, measure both between two processes; fails if one is off by more than the tolerance."""
    from paceline.protocol.errors import PacelineError
    from paceline.scripts.lab.command_rtt import _numbers
    from paceline.scripts.lab.network import LinkSpec
    from paceline.scripts.lab.real_link import measure

    if via not in ("auto", "tun", "proxy"):
        raise PacelineError(f"--via {via!r}: it is tun, proxy or auto")
    specs = [LinkSpec(seconds) for seconds in _numbers(rtt)]
    for pair in bandwidth.split(","):
        try:
            up, down = (1e6 * float(part) for part in pair.split("/"))
        except ValueError:
            raise PacelineError(f"--bandwidth {pair!r}: two numbers of Mbit/s, as in 5/20") from None
        if up or down:
            specs.append(LinkSpec(specs[0].round_trip, up=up, down=down))
    off = False
    for spec in specs:
        found = measure(spec, via)
        parts = [_part("round trip ms", 1e3 * spec.round_trip, 1e3 * found.round_trip)]
        parts += [
            _part("up Mbit/s", spec.up / 1e6, found.up / 1e6),
            _part("down Mbit/s", spec.down / 1e6, found.down / 1e6),
        ]
        off = off or any(share > tolerance for _, share in filter(None, parts))
        typer.echo("; ".join(text for text, _ in filter(None, parts)))
    if off:
        raise PacelineError(f"the link is off by more than {tolerance:.0%}; is the machine busy?")


def _part(what: str, wanted: float, found: float) -> tuple[str, float] | None:
    """A figure and by what share it is off; None where nothing was set."""
    if not wanted:
        return None
    share = abs(found / wanted - 1)
    return f"{what} {wanted:g} set, {found:.2f} measured ({found / wanted - 1:+.1%})", share
