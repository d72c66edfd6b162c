"""What Prometheus reads at /metrics."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        r = self._registry = CollectorRegistry()
        self.requests = Counter("paceline_requests", "Requests answered", ["path", "status"], registry=r)
        self.running = Gauge("paceline_generations_running", "Answers being written", registry=r)
        self.tokens = Counter("paceline_tokens", "Tokens written", registry=r)
        self.prompt_tokens = Counter("paceline_prompt_tokens", "Tokens of prompts", registry=r)
        self.steps = Counter("paceline_steps", "Steps of the target", registry=r)
        self.hits = Counter("paceline_hits", "Steps that began with drafted nodes at hand", registry=r)
        self.drafted = Counter("paceline_drafted_tokens", "Drafted nodes sent", registry=r)
        self.accepted = Counter("paceline_accepted_tokens", "Drafted nodes that became text", registry=r)
        self.alone = Counter("paceline_alone_answers", "Answers of the draft alone", registry=r)
        self.cancelled = Counter("paceline_cancelled", "Answers that their client left", registry=r)
        self.first_token = Histogram(
            "paceline_first_token_seconds", "Time to the first token", buckets=SECONDS, registry=r
        )
        self.round_trip = Gauge("paceline_round_trip_seconds", "Round trip to the verifier", registry=r)
        self.link_up = Gauge("paceline_link_up", "1 while the verifier is connected", registry=r)
        self.bytes_up = Gauge("paceline_link_sent_bytes", "Bytes sent to the verifier", registry=r)
        self.bytes_down = Gauge("paceline_link_received_bytes", "Bytes received from it", registry=r)

    def text(self) -> bytes:
        """The exposition format, version 0.0.4."""
        return generate_latest(self._registry)
