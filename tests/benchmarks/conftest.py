"""Benchmarks that run in the tests' own process compute with one thread, as the engine's tests do: with several that
share two cores with other tests, the GPU page's rehearsals take five times as long."""

from tests.workers.conftest import one_thread  # noqa: F401 - a fixture
