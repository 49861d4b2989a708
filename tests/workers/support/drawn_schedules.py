"""What simulated steps are drawn from."""

from hypothesis import strategies as st

SHAPES = st.one_of(
    st.tuples(st.sampled_from(["gpipe", "1f1b", "zb-h1"]), st.integers(2, 4), st.just(1), st.integers(1, 6)),
    st.tuples(st.just("interleaved"), st.just(2), st.just(2), st.sampled_from([2, 4, 6])),
    st.tuples(st.just("zb-v"), st.integers(2, 3), st.just(2), st.integers(1, 6)),
)
SECONDS = st.floats(0.01, 10.0)
