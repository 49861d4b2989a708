"""Names of the parts of a step, as users see them: in the API, the dashboard and the command."""

from __future__ import annotations

PHASE_LABELS = {
    "data": "input",
    "forward": "forward",
    "backward": "backward",
    "recompute": "recompute",
    "tensor_communication": "tensor-parallel comm",
    "context_communication": "context-parallel comm",
    "dispatch": "expert dispatch",
    "combine": "expert combine",
    "pipeline_communication": "pipeline comm",
    "data_communication": "data-parallel comm",
    "bubble": "pipeline bubble",
    "optimizer": "optimizer",
    "other": "other",
}
"""By the name of a part that the engine measures (`workers/timing/step_phases.py`)."""

PART_LABELS = {
    "arithmetic": "ideal compute",
    "products": "slower matmuls",
    "recomputation": "recompute",
    "bubble": "pipeline bubble",
    "tensor": "tensor-parallel comm",
    "context": "context-parallel comm",
    "expert": "expert-parallel comm",
    "pipeline": "pipeline comm",
    "data": "data-parallel comm",
    "optimizer": "optimizer",
    "loader": "input",
    "snapshot": "snapshots",
    "rest": "other",
    # Of a planned step only:
    "elementwise": "elementwise",
    "host": "kernel launches",
    "gradients": "data-parallel comm",
    "replicas": "slowest replica",
    "copies": "activation offload",
    # Groups in which a plan is compared with measurements:
    "computing": "compute",
    "tensor communication": "tensor-parallel comm",
    "context communication": "context-parallel comm",
    "expert communication": "expert-parallel comm",
    "waiting for other stages": "pipeline bubble and comm",
    "sums of gradients": "data-parallel comm",
    "update": "optimizer",
    "loading and the rest": "input and other",
}
"""By the code of a part of a measured or planned step, or of a group of them."""
