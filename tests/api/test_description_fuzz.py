"""Requests drawn from the API's own description, right ones and wrong ones: no answer is an error of the service, and
each has a status, a media type and a content that the description knows."""

import pytest
from hypothesis import Phase

from tests.api.test_openapi import OPERATIONS


@pytest.fixture
def asked(request, operation_id):
    """Asks for operations: of a server of its own where numbers are counted."""
    from tests.api.support.drawn_requests import ask

    service = request.getfixturevalue("own_service" if operation_id == "get_prometheus_metrics" else "service")
    return lambda examples, **options: ask(service, operation_id, examples, **options)


@pytest.mark.parametrize("operation_id", OPERATIONS)
def test_fuzzed_requests_get_the_answers_that_the_openapi_document_describes(asked):
    asked(6, derandomize=True, phases=[Phase.generate])


@pytest.mark.soak
@pytest.mark.parametrize("operation_id", OPERATIONS)
def test_many_fuzzed_requests_get_the_answers_that_the_openapi_document_describes(asked):
    asked(500)
