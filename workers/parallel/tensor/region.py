"""What a parallel layer knows about the ranks that share it, and how it computes."""

from __future__ import annotations

from manta.workers.comm.comm import Comm
from manta.workers.parallel.tensor.products import Products
from manta.workers.parallel.tensor.weight_gradients import WeightGradients


class Region:
    """A tensor-parallel region (arXiv:1909.08053, section 3): within it every rank has a part of a layer's width."""

    def __init__(self, comm: Comm, sequence_parallel: bool, products: Products, forward_chunks: int = 1):
        self.comm, self.sequence_parallel, self.products = comm, sequence_parallel, products
        self.weight_gradients = WeightGradients(products)
        self.tensor_size = comm.size("tensor")
        """Ranks that share each layer (t)."""
        self.sequence_split = self.tensor_size if sequence_parallel else 1
        """Ranks that the sequence is split over outside of the region."""
        self.forward_chunks = forward_chunks if self.tensor_size > 1 else 1
        """Number of chunks in which a forward product overlaps with its communication (`column_forward_in_chunks`)."""
