"""The machines that the planner knows: their data sheets, and at most eight constants each for how much of that is
reached. Pure Python.

Data-sheet values do not count as constants. The eight are those of `Constants`; `benchmarks/results/planner.md` and the
comments of `MACHINES` say which rows each was fitted to, or where else it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from manta.workers.accounting.device_table import known_peak
from manta.workers.config import JobSpec
from manta.workers.errors import MantaError

GIB = 2**30


class UnknownMachine(MantaError):
    """A cluster of machines that the planner does not know; the message lists those that it does."""


HOST_COPY = 48e9
"""Bytes/s between a device and pinned memory of its host if not measured: those of an H100 over PCIe 5, one direction
at a time."""

HOST_CORE_COPY = 8e9
"""Bytes/s at which one core copies within its host's memory; assumed, from an EPYC that had other work too."""


@dataclass(frozen=True)
class Accelerator:
    """One device, from its data sheet."""

    name: str
    memory_bytes: float
    """Memory available to a process, after what context and libraries take."""
    peak_16bit: float
    """Dense matrix products of 16-bit numbers, FLOP/s."""
    peak_fp32: float
    """Products of fp32 without TF32, FLOP/s."""
    memory_bandwidth: float
    """Bytes/s."""
    multiprocessors: int
    """Units that work on one tile of a product at a time."""
    link_bandwidth: float
    """Bytes/s that leave one device towards the others of its node."""
    peak_8bit: float | None = None
    """Products of 8-bit floats, FLOP/s; None: it has none."""


@dataclass(frozen=True)
class Constants:
    """How much of a data sheet is reached. The first five are ratios to it."""

    product: float
    """Relative to the peak rate: a large matrix product that fills all multiprocessors."""
    memory: float
    """Relative to the memory's bandwidth: element-wise kernels on large tensors."""
    inside: float
    """Relative to the links inside a node: bus bandwidth of collectives on large tensors."""
    message: float
    """Relative to a network adapter: a message between two ranks of different nodes."""
    collective: float
    """Relative to a network adapter: bus bandwidth of collectives across nodes, while all of a node's devices
    communicate."""
    spread: float
    """Standard deviation of a replica's step time, relative to it: all replicas wait for the slowest."""
    skew_seconds: float
    """How long a collective inside a node waits for the last of its ranks, while nothing else runs."""
    host_seconds: float
    """Host time of one operation, which is hidden while the device has work queued."""


@dataclass(frozen=True)
class Core:
    """What a rank that computes on one core of a CPU reaches: the eight constants of such a machine. They are absolute,
    since no data sheet gives the rates of a thread. `docs/planner.md` says what each is measured on."""

    product_fp32: float
    """Matrix products of fp32, FLOP/s."""
    product_16bit: float
    """Matrix products of bf16, FLOP/s."""
    attention_width: float
    """Cost of the softmax within fused attention, expressed as additional width of each head in its products;
    elements."""
    memory: float
    """Memory traffic of element-wise kernels and the optimizer, bytes/s."""
    operation_seconds: float
    """Fixed cost of an operation: Python, autograd, and the kernel's launch."""
    link: float
    """Bytes/s of a message at one of its ends, where it takes a core's time."""
    message_seconds: float
    """Fixed cost of a message at either end."""
    all_busy: float
    """Speed of a core while all cores compute, relative to that of one alone."""

    def product_rate(self, width: int) -> float:
        """Rate of products of elements of `width` bytes, FLOP/s."""
        return self.product_16bit if width == 2 else self.product_fp32


@dataclass(frozen=True)
class Gpu:
    """The eight constants measured by calibrating one GPU, which replace assumed values for products, memory and host.
    `docs/planner.md` says what each is measured on."""

    product_16bit: float
    """FLOP/s of matrix products of 16-bit numbers that fill all multiprocessors."""
    product_fp32: float
    """FLOP/s of matrix products of fp32."""
    attention: float
    """FLOP/s of fused attention's forward, over the scores that the causal mask leaves, with `SOFTMAX` in
    operations.py."""
    memory: float
    """Bytes/s of element-wise kernels on large tensors."""
    update: float
    """Bytes/s of an update without torch.compile."""
    kernel_seconds: float
    """Fixed cost of a kernel on the device, with others queued behind it."""
    host_seconds: float
    """Host time of one operation (`Budget.operations`)."""
    copy: float
    """Bytes/s between the device and pinned memory of its host, in the slower direction."""
    adds_wider: bool = False
    """Not a constant: whether products there add 16-bit gradients to fp32 sums themselves (torch 2.13)."""


@dataclass(frozen=True)
class Links:
    """Two constants measured between the GPUs of one node, which replace the assumed `Constants.inside` and the assumed
    time of a hop. `docs/planner.md` says what they are fitted to."""

    bandwidth: float
    """Bytes/s of a ring, and of a message."""
    hop_seconds: float
    """Fixed cost of each hop of a ring, and of a message."""
    error: float = 0.0
    """Not a constant: the mean absolute difference between the logarithms of measured and predicted times."""


@dataclass(frozen=True)
class Refined:
    """What the measured steps of jobs have changed in a machine's constants (`refinement.py`)."""

    jobs: int
    """Number of jobs that it is based on."""
    before: tuple[tuple[str, float], ...]
    """Each constant that jobs may move, with its value without any job."""


@dataclass(frozen=True)
class Machine:
    """A node with accelerators, or with cores that are used instead."""

    accelerator: Accelerator
    devices: int
    """Accelerators of a node as sold; a cluster may use fewer."""
    adapters: float
    """Network adapters of a node, shared by its accelerators."""
    adapter_bandwidth: float
    """Bytes/s of one adapter, each way."""
    constants: Constants
    core: Core | None = None
    """If ranks compute on cores: the constants of a core, used instead of `constants`."""
    cores: int = 0
    """Number of cores of such a node, which its ranks share."""
    threads: int = 1
    """Threads of each rank on such a node."""
    numa_nodes: int = 0
    """NUMA nodes among which accelerators and adapters are divided; 0: irrelevant or unknown."""
    gpu: Gpu | None = None
    """Measurements of one of its GPUs; also in `constants` if there is a corresponding field."""
    links: Links | None = None
    """Measurements between its GPUs; the bandwidth is in `constants` too."""
    refined: Refined | None = None
    """Set if jobs have moved some of its constants."""
    measured_on: str | None = None
    """The GPU that was measured, as its driver calls it, if it has another form than `accelerator` (`form_factor`)."""

    @property
    def adapters_per_accelerator(self) -> float:
        """Adapters per accelerator."""
        return self.adapters / self.devices

    @property
    def has_gpus(self) -> bool:
        """Whether each rank has an accelerator of its own."""
        return self.core is None

    @property
    def is_assumed(self) -> bool:
        """Whether nothing was fitted or measured on such a machine."""
        return self.core == ASSUMED_CORE or (self.core is None and self.constants == HOPPER)

    @property
    def sums_apart(self) -> bool:
        """Whether products for weights there write fp32 matrices that are then added to the sums."""
        return self.gpu is not None and not self.gpu.adds_wider

    @property
    def hop_seconds(self) -> float:
        """Seconds of one hop of a ring between its GPUs."""
        return INSIDE_LATENCY if self.links is None else self.links.hop_seconds

    @property
    def links_are_assumed(self) -> bool:
        """Whether its GPUs were measured, but the links between them were neither fully fitted nor measured."""
        replaced = ASSUMED_OF_GPU if self.links is None else ASSUMED_OF_GPU | {"inside": HOPPER.inside}
        return self.gpu is not None and replace(self.constants, **replaced) == HOPPER


@dataclass(frozen=True)
class Cluster:
    """`nodes` nodes of one kind, and possibly others."""

    machine: Machine
    nodes: int
    gpus_per_node: int
    type: str | None = None
    """Ray's name for the type of their GPUs, if there are other kinds."""
    others: tuple[Cluster, ...] = ()
    """Nodes of other kinds. A layout that does not say where its stages are does not use them."""

    @property
    def gpus(self) -> int:
        """Accelerators of the nodes of the first kind."""
        return self.nodes * self.gpus_per_node

    @property
    def parts(self) -> tuple[Cluster, ...]:
        """One cluster for each kind of node."""
        return replace(self, others=()), *self.others


INSIDE_LATENCY, BETWEEN_LATENCY = 3.4e-6, 14.0e-6
"""Seconds of one hop of a ring inside a node and between two: the values that NCCL's own tuning model assumes (its
simple protocol; github.com/NVIDIA/nccl, src/graph/tuning.cc)."""
NUMA_BANDWIDTH = 16e9
"""Bytes/s, each way, between two NUMA nodes with AMD's processors: the value that NCCL assumes since 2.16 when it
chooses paths (src/graph/topo.h there)."""


def _accelerator(
    name: str, gibibytes: float, terabytes: float, multiprocessors: int, link: float, peak_name: str | None = None
) -> Accelerator:
    peak, wide, narrow = (known_peak(peak_name or name, precision) for precision in ("bf16", "fp32", "fp8"))
    assert peak is not None and wide is not None
    return Accelerator(name, gibibytes * GIB, peak, wide, terabytes * 1e12, multiprocessors, link * 1e9, narrow)


A100 = Constants(
    product=0.82,
    memory=0.8,
    inside=0.77,
    message=0.745,
    collective=0.5,
    spread=0.02,
    skew_seconds=2.25e-4,
    host_seconds=6e-5,
)
"""product and skew_seconds: fitted on the four A100 rows of the README's tensor-parallel table, spread on the four of
its data-parallel table. message and collective: from the text of arXiv:2104.04473, section 5.9: 892 GB/s through the 48
links between two stages, 12.9 TB/s through the 2 x 512 links of its rings at their narrowest. inside: 230 GB/s of 300
that nccl-tests report for eight GPUs. memory: 1.6 TB/s of 2.0. host_seconds: 16 operations take about 1 ms in a layer
without graphs; nothing was fitted."""
V100 = replace(A100, product=0.92, skew_seconds=2e-4)
"""product and skew_seconds: fitted on the four V100 rows of Megatron-LM's README of September 2020 (its peak is that of
the data sheet; those GPUs have a higher power limit). The others are those of the A100."""
HOPPER = replace(A100, product=0.70, collective=A100.message, skew_seconds=1e-4, host_seconds=3e-5)
"""Nothing was fitted: products reach a smaller part of a higher peak under the same power limits, hosts are faster. The
A100's collective is low because groups with one GPU per node share four of its eight adapters; since NCCL 2.12, which
is older than Hopper, each of them leaves by the nearest adapter."""
ASSUMED_OF_GPU = {name: getattr(HOPPER, name) for name in ("product", "memory", "host_seconds")}
"""The constants that a calibration of one GPU does not replace keep these values."""

MACHINES = {
    # DGX-2: arXiv:1909.08053, section 5 (32 GB, NVSwitch of 300 GB/s both ways, 8 adapters of 100 Gb/s).
    "v100-32gb": Machine(_accelerator("v100-32gb", 31.7, 0.900, 80, 150, "v100-sxm"), 16, 8, 12.5e9, V100),
    "v100-16gb": Machine(_accelerator("v100-16gb", 15.8, 0.900, 80, 150, "v100-sxm"), 8, 4, 12.5e9, V100),
    # DGX A100: NVSwitch of 600 GB/s both ways, 8 adapters of 200 Gb/s (arXiv:2104.04473, section 5); two GPUs and two
    # adapters on each of four NUMA nodes (github.com/NVIDIA/nccl/issues/1505).
    "a100-80gb": Machine(_accelerator("a100-80gb", 79.2, 2.039, 108, 300, "a100"), 8, 8, 25e9, A100, numa_nodes=4),
    "a100-40gb": Machine(_accelerator("a100-40gb", 39.4, 1.555, 108, 300, "a100"), 8, 8, 25e9, A100, numa_nodes=4),
    # DGX H100 and its successors: NVLink of 900 GB/s both ways, 8 adapters of 400 Gb/s.
    "h100-80gb": Machine(_accelerator("h100-80gb", 79.1, 3.35, 132, 450, "h100"), 8, 8, 50e9, HOPPER),
    "h200-141gb": Machine(_accelerator("h200-141gb", 139.8, 4.8, 132, 450, "h200"), 8, 8, 50e9, HOPPER),
    "b200-180gb": Machine(_accelerator("b200-180gb", 178.0, 8.0, 148, 900, "b200"), 8, 8, 50e9, HOPPER),
    # PCIe 4.0 x16 to the host and no links between devices.
    "l40s-48gb": Machine(_accelerator("l40s-48gb", 44.4, 0.864, 142, 25, "l40s"), 8, 2, 25e9, HOPPER),
}
"""By the name under which a cluster asks for them."""


ASSUMED_CORE = Core(
    product_fp32=50e9,
    product_16bit=50e9,
    attention_width=32.0,
    memory=20e9,
    operation_seconds=1e-5,
    link=1.5e9,
    message_seconds=3e-5,
    all_busy=0.9,
)
"""Nothing was fitted or measured: a placeholder until a machine is calibrated."""


def with_threads(cluster: Cluster, threads: int) -> Cluster:
    """The cluster with ranks that compute with `threads` threads each. An operation that is split among threads wakes
    the others, which takes as long as waking the receiver of a message."""
    machine, core = cluster.machine, cluster.machine.core
    if core is None or threads == machine.threads:
        return cluster
    operation = core.operation_seconds + (core.message_seconds if threads > 1 else 0.0)
    constants = replace(machine.constants, host_seconds=operation)
    return replace(cluster, machine=replace(machine, constants=constants, threads=threads))


@dataclass(frozen=True)
class CpuNode:
    """A node whose ranks compute on cores."""

    cores: int
    memory_bytes: float
    core: Core = ASSUMED_CORE

    def machine(self, slots: int) -> Machine:
        """The machine with room for `slots` ranks."""
        return cpu_machine(slots, self.cores, self.memory_bytes, self.core)


def cpu_machine(slots: int, cores: int, memory_bytes: float, core: Core = ASSUMED_CORE) -> Machine:
    """A node whose ranks compute with one CPU thread each, on `cores` that they share. `memory_bytes`: of the node."""
    share = min(1.0, cores / slots)
    rates = (core.product_16bit * share, core.product_fp32 * share, core.memory * share)
    device = Accelerator("cpu", memory_bytes / slots, *rates, 1, core.link)
    reached = Constants(1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, core.operation_seconds)
    return Machine(device, slots, 1, 1e9, reached, core, cores)


def machine_of(name: str) -> Machine:
    """The machine with accelerators called `name`; `a100` and the like mean the variant with most memory. Raises
    UnknownMachine."""
    wanted = name.lower()
    fitting = [known for known in MACHINES if known == wanted or known.split("-")[0] == wanted]
    if not fitting:
        raise UnknownMachine(f"unknown accelerator {name!r}; known are {', '.join(MACHINES)}")
    return MACHINES[max(fitting, key=lambda known: MACHINES[known].accelerator.memory_bytes)]


def measured(machine: Machine, gpu: Gpu, links: Links | None = None) -> Machine:
    """The machine with the measurements of one of its GPUs, and of the links between them if there are any."""
    device = machine.accelerator
    product, memory = gpu.product_16bit / device.peak_16bit, gpu.memory / device.memory_bandwidth
    constants = replace(machine.constants, product=product, memory=memory, host_seconds=gpu.host_seconds)
    known = replace(machine, constants=constants, gpu=gpu)
    return known if links is None else linked(known, links)


def linked(machine: Machine, links: Links) -> Machine:
    """The machine with the measurements of the links between its GPUs."""
    inside = links.bandwidth / machine.accelerator.link_bandwidth
    return replace(machine, constants=replace(machine.constants, inside=inside), links=links)


def named_by_driver(device: str, memory_bytes: float) -> str | None:
    """The name in MACHINES of a GPU that its driver calls `device`; None if there is none."""
    words, kinds = _words(device), {name.split("-")[0] for name in MACHINES}
    kind = next((word for word in words if word in kinds), None)
    return None if kind is None or "mig" in words else machine_name(kind, memory_bytes)


def form_factor(device: str) -> str | None:
    """PCIe or NVL, where a driver calls its GPU so: one with other rates, memory and links than MACHINES has under that
    name, where GPUs with NVLink (SXM) are meant."""
    return next((form for form in ("PCIe", "NVL") if form.lower() in _words(device)), None)


def _words(device: str) -> list[str]:
    return device.lower().replace("-", " ").split()


def ray_type(name: str) -> str:
    """What Ray calls the accelerator `name` of MACHINES."""
    return name.split("-")[0].upper()


def machine_name(ray_type: str, memory_bytes: float | None) -> str | None:
    """The name in MACHINES of the type that Ray calls `ray_type`, such as H100 or A100-40G. Of several variants it is
    the one with that much memory, or with most if that is unknown. None if there is none."""
    exact = f"{ray_type.lower()}b"
    if exact in MACHINES:
        return exact
    alike = [name for name in MACHINES if name.split("-")[0] == ray_type.lower()]
    sizes = {name: MACHINES[name].accelerator.memory_bytes for name in alike}
    small_enough = [name for name in alike if memory_bytes is None or sizes[name] <= memory_bytes * 1.05]
    return max(small_enough or alike, key=lambda name: sizes[name], default=None)


def parts_of(spec: JobSpec, cluster: Cluster) -> tuple[Cluster, ...]:
    """The nodes that each pipeline stage of a job is on; if its layout does not say so and there are several kinds,
    those of the lowest peak rate. Raises UnknownMachine if the layout asks for nodes that are not there."""
    types = spec.layout.stage_accelerators
    if types is None or not cluster.machine.has_gpus:
        weakest = (
            min(cluster.parts, key=lambda part: part.machine.accelerator.peak_16bit) if cluster.others else cluster
        )
        return (weakest,) * spec.layout.pipeline
    known = {type: part for type in set(types) for part in cluster.parts if _has(part, type)}
    if missing := [type for type in types if type not in known]:
        there = ", ".join(part.type or ray_type(part.machine.accelerator.name) for part in cluster.parts)
        raise UnknownMachine(f"parallel.stage_accelerators: no node has GPUs of type {missing[0]}; there are {there}")
    return tuple(known[type] for type in types)


def _has(part: Cluster, type: str) -> bool:
    """Whether these nodes have GPUs that Ray calls `type`."""
    device = part.machine.accelerator
    return type == part.type if part.type is not None else machine_name(type, device.memory_bytes) == device.name
