"""OpenTelemetry spans of a verifier: one for each connection, and below it one for each of its sessions. Off unless asked for.

A span says who (the key's name), how much and how well, as the audit does; never a prompt, a token or a key. It knows nothing of
steps: there are too many, and what they tell is in the metrics. Where spans go, and as which service, the OTEL_* variables say.
"""

from collections.abc import Mapping
from threading import Thread
from typing import TYPE_CHECKING, Any

from paceline.protocol.errors import PacelineError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.trace import Span

SERVICE = "paceline-cloud"  # unless OTEL_SERVICE_NAME says otherwise
CLOSE_SECONDS = 5.0  # what is still to be sent gets this long at the end


class Spans:
    """Begun and ended as connections and sessions come and go; all of it on the event loop, sending is on a thread."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("paceline")
        self._connections: dict[str, Span] = {}  # by the connection's id
        self._sessions: dict[str, Span] = {}  # by resume token

    @classmethod
    def exporting(cls, processor: "SpanProcessor | None" = None) -> "Spans":
        """Sends over OTLP and HTTP, or hands spans to `processor`. Raises PacelineError if OpenTelemetry is not installed."""
        try:
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider

            if processor is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
                from opentelemetry.sdk.trace.export import BatchSpanProcessor

                processor = BatchSpanProcessor(OTLPSpanExporter())
        except ImportError as e:
            raise PacelineError(f"spans need {e.name or 'OpenTelemetry'}: pip install 'paceline[otel]'") from None
        resource = Resource({"service.name": SERVICE}).merge(OTELResourceDetector().detect())
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(processor)
        return cls(provider)

    def came(self, connection: str, key: str) -> None:
        self._connections[connection] = self._tracer.start_span("connection", attributes=_named({"key": key}))

    def went(self, connection: str) -> None:
        if (span := self._connections.pop(connection, None)) is not None:
            span.end()

    def seated(self, session: str, connection: str, *, resumed: bool) -> None:
        """The session of that resume token begins, or goes on, over the connection."""
        from opentelemetry.trace import set_span_in_context

        parent = self._connections.get(connection)
        context = set_span_in_context(parent) if parent is not None else None
        self._sessions[session] = self._tracer.start_span("session", context, attributes=_named({"resumed": resumed}))

    def left(self, session: str, figures: Mapping[str, Any]) -> None:
        """It has ended, or lost its edge; `figures` as in the audit."""
        if (span := self._sessions.pop(session, None)) is not None:
            span.set_attributes(_named(figures))
            span.end()

    def close(self) -> None:
        """Send what is left. Blocking, but not for long: a collector that does not answer keeps nobody."""
        closing = Thread(target=self._provider.shutdown, daemon=True, name="spans")
        closing.start()
        closing.join(CLOSE_SECONDS)


def _named(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {f"paceline.{name}": value for name, value in figures.items()}
