"""Which Paceline this is."""

from importlib.metadata import PackageNotFoundError, version


def installed() -> str | None:
    """The installed version; None in a checkout that is not installed."""
    try:
        return version("paceline")
    except PackageNotFoundError:
        return None
