"""The names of metrics are found in queries, and nothing else is."""

import pytest

from tests.deploy.promql import metric_names


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("up", {"up"}),
        ('sum by (job) (rate(a_total{x="b{c}", y=~"d"}[5m])) / ignoring (z) b', {"a_total", "b"}),
        ("a:b:max offset 10m > 0.85 * avg_over_time(c[1h] offset 10m)", {"a:b:max", "c"}),
        ("sum(a) by (b) and on (c) group_left (d) e or 1e3 * f unless bool_g", {"a", "e", "f", "bool_g"}),
        ("histogram_quantile(0.95, sum by (le) (rate(a_bucket[$__rate_interval])))", {"a_bucket"}),
        ("vector(0)", set()),
    ],
)
def test_metric_names_of_a_promql_query_are_found(query, names):
    assert metric_names(query) == names
