"""What a verifier tells Prometheus: read from the running totals when asked, so that the steps pay nothing for it.

The names of speculation and of the KV cache are the field's (`spec_decode_num_draft_tokens`, `kv_cache_usage_perc` and their
kin, as vLLM has them), under the prefix `paceline_`; the rest says what streaming adds: hits, stale nodes, sessions that wait
for their edge.
"""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from paceline.cloud.connection import House
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "paceline_"


class VerifierCollector(Collector):
    """Metrics of one verifier."""

    def __init__(self, house: House) -> None:
        self._house = house

    def collect(self) -> Iterator[Metric]:
        f = self._house.scheduler.figures
        for name, text, value in (
            ("steps", "Verification steps.", f.steps),
            ("step_seconds", "Seconds spent in steps, pacing included.", f.step_seconds),
            ("engine_seconds", "Seconds spent in the engine.", f.engine_seconds),
            ("rows", "Rows run through the target.", f.rows),
            ("generation_tokens", "Tokens committed.", f.tokens),
            ("spec_decode_num_drafts", "Sessions' steps that verified drafted nodes.", f.drafts),
            ("spec_decode_num_draft_tokens", "Drafted nodes verified.", f.verified),
            ("spec_decode_num_accepted_tokens", "Drafted nodes accepted.", f.accepted),
            ("session_steps", "Steps, counted once for each session in them.", f.session_steps),
            ("hits", "Sessions' steps that began with at least one node held.", f.hits),
            ("stale_nodes", "Drafted nodes that came late or disagreed.", f.stale),
        ):
            yield CounterMetricFamily(PREFIX + name, text, value=float(value))
        for name, text, level in (
            ("sessions", "Sessions being generated.", len(self._house.scheduler)),
            ("sessions_queued", "Sessions that wait for a place.", len(self._house.admission)),
            ("sessions_waiting", "Sessions whose edge is gone and may resume.", len(self._house.waiting)),
            ("connections", "Edges connected.", self._house.connections),
            ("ready", "1 while new sessions are taken.", int(not self._house.draining)),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=float(level))
        yield from self._cache()
        info = GaugeMetricFamily(PREFIX + "info", "Version and model.", labels=["version", "model"])
        info.add_metric([own_version(), self._house.model], 1.0)
        yield info

    def _cache(self) -> Iterator[Metric]:
        """Nothing where the target's cache has no fixed size."""
        blocks = self._house.scheduler.blocks
        if blocks is None:
            return
        for name, text, level in (
            (
                "kv_cache_usage_perc",
                "Share of the KV cache that sessions hold; 1 is all of it.",
                blocks.used / blocks.total,
            ),
            ("kv_cache_used_blocks", "Blocks of the KV cache that sessions hold.", blocks.used),
            ("kv_cache_total_blocks", "Blocks of the KV cache.", blocks.total),
            ("kv_cache_block_tokens", "Tokens that a block of the KV cache takes.", blocks.tokens),
        ):
            yield GaugeMetricFamily(PREFIX + name, text, value=float(level))


def registry(house: House) -> CollectorRegistry:
    made = CollectorRegistry(auto_describe=False)
    made.register(VerifierCollector(house))
    return made


def exposition(metrics: CollectorRegistry) -> bytes:
    """The text that GET /metrics answers."""
    return generate_latest(metrics)


def own_version() -> str:
    try:
        return version("paceline")
    except PackageNotFoundError:
        return "unknown"
