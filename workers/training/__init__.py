"""The training of one rank around its engine: state, reports, traces."""
