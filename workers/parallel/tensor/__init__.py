"""Tensor parallelism (Shoeybi et al., arXiv:1909.08053, section 3): a layer's weights are split over t ranks.

Where to find what section 3 describes:

- MLP, first product split over columns, GELU, second one over rows (figure 3a): `layers.ColumnParallelLinear` and
  `layers.RowParallelLinear`; weights are stored [out, in], so the paper's columns are rows here.
- Attention, split over heads (figure 3b): the same layers, with whole heads on each rank (workers/model/gpt.py).
- f and g, identity and all-reduce, forward and backward (figure 4): the products do their own communication, `linear`;
  what leaves without a product, `sequence_parallel.leave`.
- Embedding split over the vocabulary, and the output layer: `layers.VocabularyParallelEmbedding`,
  `layers.VocabularyParallelOutput`; how the two are tied, workers/model/stage.py.
- Cross-entropy without gathering the logits: `cross_entropy`.
- Dropout (the paper's two random states): `dropout`, by a hash that is the same under every layout.

Beside that: sequence parallelism (arXiv:2205.05198, section 4.2.2), `sequence_parallel`; what every parallel layer
knows, `region`; the matrix products themselves, behind one seam, `products`; where their gradients go,
`weight_gradients`; what part of the model a parameter is, `shards`; the products for torch.compile,
`compiled_operators`.
"""
