"""Whatever is put where a spec has a value, the answer is a verdict on the spec, never an internal error."""

import copy
import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**4), 10**4)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
paths = st.sampled_from(
    [
        ("name",), ("model",), ("model", "layers"), ("model", "heads"), ("model", "vocabulary_size"),
        ("data", "source"), ("data", "paths"), ("train",), ("train", "steps"), ("train", "global_batch_size"),
        ("train", "optimizer"), ("parallel",), ("parallel", "tensor"), ("parallel", "data"),
        ("elastic", "max_data"), ("priority",), ("something", "else"),
    ]
)  # fmt: skip


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=paths, value=values, dry_run=st.booleans())
def test_spec_with_any_value_at_any_path_is_accepted_or_refused_with_a_problem(service, document, path, value, dry_run):
    changed = copy.deepcopy(document)
    place = changed
    for part in path[:-1]:
        place = place.setdefault(part, {})
    place[path[-1]] = value
    body = json.dumps(changed).encode()  # lone surrogates travel as escapes, as clients send them
    response = service.http.post(
        "/v1/jobs", params={"dry_run": dry_run}, content=body, headers={"Content-Type": "application/json"}
    )
    assert response.status_code in (200 if dry_run else 201, 400, 422), response.text
    if response.is_success:
        return
    problem = response.json()
    assert problem["code"] in ("invalid_spec", "unsupported", "malformed_json")
    assert problem["errors"] or problem["code"] == "malformed_json"


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    resource=st.sampled_from(["", "/{id}/metrics", "/{id}/events", "/{id}/logs", "/{id}/checkpoints"]),
    name=st.sampled_from(["limit", "cursor", "state", "name", "names", "after_step", "max_points", "rank"]),
    value=st.text(max_size=30) | st.integers().map(str),
)
def test_query_parameters_of_any_value_get_an_answer_or_a_refusal(service, resource, name, value):
    listed = service.http.get("/v1/jobs").json()["items"]
    job_id = (listed[0] if listed else service.submit())["id"]
    response = service.http.get("/v1/jobs" + resource.replace("{id}", job_id), params={name: value})
    refused = response.status_code == 422 or response.json().get("code") == "rank_not_found"
    assert response.status_code == 200 or refused, response.text
