"""Responses of the REST API. The client parses them with the same models that the server writes them with."""

from manta.api.schemas.base import (
    Answer,
    Direction,
    FieldProblem,
    Health,
    Items,
    Number,
    Problem,
    Stream,
    Time,
    rfc3339,
)
from manta.api.schemas.cluster import Cluster, ClusterCheck, Gpu, Node, RunningRank
from manta.api.schemas.history import (
    Checkpoint,
    Event,
    Export,
    JobEvent,
    Ledger,
    LedgerInterval,
    LogLine,
    LogLines,
    MetricSeries,
    Recovery,
)
from manta.api.schemas.jobs import DeletedJob, DryRun, Job, JobCounts, JobSort, LatestMetrics, Layout, Queue, Sparkline
from manta.api.schemas.plans import (
    BesideSteps,
    ComparedPart,
    JobPlan,
    Machine,
    MeasuredStep,
    Plan,
    PlanChange,
    PlanDrift,
    PlanExplanation,
    PlanMemory,
    PlannedPart,
    PlannedPass,
    PlannedRun,
    PlannedStep,
    Plans,
    PlanSize,
    RejectedPlan,
    StepParts,
    StepShare,
)
from manta.api.schemas.ranks import Fault, Rank, RankHistory, RankPlace, RankStack, Straggler, WaitingRank, Waits
