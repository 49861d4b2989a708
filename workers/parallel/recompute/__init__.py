"""Activation recomputation (Korthikanti et al., arXiv:2205.05198, section 5): activations that forward drops and
backward recomputes. `policy`: what, and of which micro-batches. `modules`: how it comes back.

| dropped | kept instead | how it comes back in backward |
| --- | --- | --- |
| core attention, written out | q, k, v, kept anyway | q k^T, softmax and mask, in the attention's own backward |
| core attention, fused kernel | q, k, v, kept anyway | the whole kernel, by `checkpointed` |
| outputs of the norms | their inputs, kept anyway | the norm, in backward of the product that took its output |
| output of GELU | its input, kept anyway | GELU, in backward of the product that took its output |
| a whole layer (`full`) | the layer's input | the layer's forward, by `checkpointed` |
"""
