"""The service's numbers for Prometheus, read at scrape time, so that they cannot go stale; and how each is declared, so
that all that can be scraped is known without a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, ParamSpec

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

P = ParamSpec("P")
Samples = Iterable[tuple[Sequence[str], float]]
"""Values of the labels, and the number."""


@dataclass(frozen=True)
class Family:
    """All series of one name."""

    name: str
    """With its unit; a counter's ends with `_total`."""
    text: str
    """What it is, with its unit and range."""
    labels: tuple[str, ...] = ()
    kind: Literal["gauge", "counter"] = "gauge"

    def of(self, samples: Samples) -> Metric:
        """The family with these samples."""
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = make(self.name, self.text, labels=self.labels)
        for labels, value in samples:
            family.add_metric(list(labels), value)
        return family


def counter(name: str, text: str, *labels: str) -> Family:
    """A number that only grows, as long as the same process or the same job is asked."""
    return Family(name, text, labels, "counter")


def gauge(name: str, text: str, *labels: str) -> Family:
    """A number as it is now."""
    return Family(name, text, labels)


def if_known(value: Callable[P, float | None]) -> Callable[P, Samples]:
    """A function that returns the value as the only sample; none if it is not known."""

    def samples(*of: P.args, **more: P.kwargs) -> Samples:
        known = value(*of, **more)
        return [] if known is None else [((), known)]

    return samples
