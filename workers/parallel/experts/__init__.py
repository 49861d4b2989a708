"""Mixture of experts (Shazeer et al., arXiv:1701.06538; dropless as in MegaBlocks, arXiv:2211.15841): the MLP of a
layer whose router chooses some of its experts for each token (decision 0065).

`routing` says which experts a token goes to and with which weights, `choice` keeps that for the micro-batch, `balance`
spreads tokens evenly, `rows` computes the experts, `exchange` brings tokens to them and back, `layer` is the whole.

Everything is inside the tensor-parallel region: the router computes the same on every tensor rank, each expert is split
over the ranks by its inner width, and the partial sums of all experts leave the region together.

Shapes: s sequence, b micro-batch, n = s b tokens, h hidden, E experts of the layer, k experts per token, m rows of the
experts that a rank has (n k of all of them), f inner width of an expert on this rank.
"""
