"""Options of the charts."""

import json
from datetime import UTC, datetime

from api.schemas import Event
from api.ui import charts

NAN = float("nan")


def event(step, kind="state_changed", to="RECOVERING"):
    now = datetime.now(UTC)
    return Event(id="1", time=now, type=kind, generation=1, rank=None, step=step, message="", data={"to": to})


def test_restarts_are_the_steps_of_recoveries():
    events = [event(9), event(3), event(9), event(None), event(4, to="RUNNING"), event(5, kind="submitted")]
    assert charts.restart_steps(events) == [3, 9]


def test_series_are_in_order_with_gaps_for_what_cannot_be_drawn():
    points = {3: {"loss": 1.0}, 1: {"loss": NAN}, 2: {"loss": float("inf")}, 4: {}}
    assert charts.series(points, "loss") == [[1, None], [2, None], [3, 1.0], [4, None]]
    assert charts.series(points, "loss", 100.0, sparse=True) == [[3, 100.0]]


def test_the_loss_chart_names_its_axes_and_marks_restarts():
    options = charts.loss_options({1: {"loss": 2.0, "validation_loss": NAN}, 2: {"validation_loss": 2.5}}, [7])
    train, validation = options["series"]
    assert train["data"] == [[1, 2.0], [2, None]]
    assert validation["data"] == [[2, 2.5]]
    assert train["markLine"]["data"] == [{"xAxis": 7}]
    assert (options["xAxis"]["name"], options["yAxis"][0]["name"]) == ("step", "loss (nats per token)")
    json.dumps(options, allow_nan=False)


def test_each_validation_set_that_has_a_loss_has_a_line():
    points = {1: {"loss": 2.0}, 2: {"validation_loss": 2.5, "validation_loss_code": 3.0}}
    sets = {"code": "validation_loss_code", "prose": "validation_loss_prose"}
    lines = {line["name"]: line for line in charts.loss_options(points, [], sets)["series"]}
    assert list(lines) == ["train loss", "validation loss", "validation code"]
    assert lines["validation code"]["data"] == [[2, 3.0]]
    assert len({line["itemStyle"]["color"] for line in lines.values()}) == 3


def test_throughput_and_utilisation_have_an_axis_each():
    options = charts.throughput_options({1: {"tokens_per_second": 1000.0, "mfu_full": 0.25}})
    tokens, mfu = options["series"]
    assert (tokens["data"], mfu["data"], mfu["yAxisIndex"]) == ([[1, 1000.0]], [[1, 25.0]], 1)
    assert [axis["name"] for axis in options["yAxis"]] == ["tokens/s", "MFU, full attention (%)"]
