"""What Prometheus is told. Names that came in a request are no labels: there would be no end of them."""

from collections.abc import Iterator
from time import perf_counter

from perlclip.errors import PerlclipError
from perlclip.serve.guard import Guard
from perlclip.serve.service import Service

try:
    from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
except ImportError as error:
    raise PerlclipError("a service counts with prometheus-client: pip install 'perlclip[serve]'") from error
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Counters:
    """Middleware that counts requests by route and status, and what the parts of a service have counted themselves."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service
        self.guard: Guard | None = None
        self.registry = CollectorRegistry()
        self.requests = Counter("perlclip_requests", "Requests.", ("route", "status"), registry=self.registry)
        self.seconds = Histogram(
            "perlclip_request_seconds", "Time to answer.", ("route",), buckets=SECONDS, registry=self.registry
        )
        self.registry.register(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        self.guard = scope.get("perlclip.guard")
        scope["perlclip.counters"] = self
        began, status = perf_counter(), 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noting)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.requests.labels(route, str(status)).inc()
            self.seconds.labels(route).observe(perf_counter() - began)

    def text(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Called by Prometheus's own client."""
        service, shelf = self.service, self.service.shelf
        gauges = {
            "perlclip_rows_waiting": ("Answers that are being worked on or wait.", service.batcher.reserved),
            "perlclip_adapters_loaded": ("Adapters in memory.", len(shelf.loaded())),
            "perlclip_adapter_bytes": ("Memory of these.", shelf.bytes),
        }
        counters = {
            "perlclip_rows": ("Images answered by an adapter.", service.batcher.rows),
            "perlclip_batches": ("Batches of these.", service.batcher.batches),
            "perlclip_adapter_loads": ("Adapters read from disk.", shelf.loads),
            "perlclip_adapters_dropped": ("Adapters dropped to make room.", shelf.dropped),
            "perlclip_decoder_deaths": ("Decoding processes that were replaced.", service.decoders.deaths),
        }
        yield from (GaugeMetricFamily(name, what, value) for name, (what, value) in gauges.items())
        yield from (CounterMetricFamily(name, what, value) for name, (what, value) in counters.items())
        refused = CounterMetricFamily("perlclip_refused", "Requests refused by the guard.", labels=("status",))
        for status, count in (self.guard.refused if self.guard else {}).items():
            refused.add_metric([str(status)], count)
        yield refused
