"""A process that shows the whole catalogue, and counts something in every series before each scrape.

Prints its port, and serves until it is ended.
"""

from __future__ import annotations

import itertools
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hybridkv.metrics import CATALOGUE, Catalogue, Counts, Kind, PrometheusSink

STORES = ("ram", "disk")
ENGINE_LABELS = ["model_name", "engine"]
ENGINES = {0: ["tiny", "0"], 1: ["tiny", "1"]}


def count_everything(catalogue: Catalogue) -> Counts:
    """1 of each counter, a number for each gauge, an observation in each bucket of each histogram."""
    counts = Counts(catalogue)
    for metric in catalogue.metrics:
        if metric.series_labels is None:
            continue
        for values in itertools.product(*(label.values for label in metric.series_labels)):
            labels = dict(zip(metric.label_names, values, strict=True))
            match metric.kind:
                case Kind.COUNTER:
                    counts.add(metric.name, 1, **labels)
                case Kind.GAUGE:
                    counts.set(metric.name, 1, **labels)
                case Kind.HISTOGRAM:
                    for bound in metric.buckets:
                        counts.observe(metric.name, bound, **labels)
    return counts


def main() -> None:
    registry = CollectorRegistry()
    classes = [partial(metric_class, registry=registry) for metric_class in (Counter, Gauge, Histogram)]
    catalogues = (CATALOGUE, CATALOGUE.only_with_label("connector", STORES))
    sinks = [(catalogue, PrometheusSink(catalogue, *classes, ENGINE_LABELS, ENGINES)) for catalogue in catalogues]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            for catalogue, sink in sinks:
                for engine in ENGINES:
                    sink.observe(count_everything(catalogue).to_dict(), engine)
            body = generate_latest(registry)
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
