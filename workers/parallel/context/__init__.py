"""Context parallelism: several ranks share each sample's sequence, and only attention looks across its parts.

A rank's keys and values are needed by others in one of three ways: every layer gathers them (`gathered.py`), they
travel around a ring (`ring.py`), or attention is split over heads instead (`by_heads.py`). The first two compute
attention tile by tile (`tiles.py`, `kernels.py`) and merge the results by the log-sums of their softmax.
"""
