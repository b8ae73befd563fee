"""The kernels of a decode step: add a token to each of a few texts, at nearly the memory's bandwidth.

* `rows`: the state of the rows and the rules of drawing;
* `products`: the matrices, also in fp8, with RMSNorm, residual sum, SwiGLU and the rules of logits fused in; their
  tiles;
* `attention`: RoPE, the cache's new key and value, attention to all old ones; a whole text's keys and values;
* `sampling`: the next token and its embedding.

A step runs five kernels per layer. They are so short that the gaps between launches would matter, so they overlap by
programmatic dependent launch (PDL). A kernel first loads data that no kernel of the step writes (weights, old keys),
then waits for the previous kernel, and lets the next kernel begin. Kernels of a single row let the next kernel begin
before they wait, so that many kernels may have begun; before its wait, a kernel must not read what any of them
writes. Every program that does not exit at once must wait. Otherwise the next kernel could pass its own wait while
the previous kernel still runs.

The order of a row's sums depends only on the row's own length. So a row has the same bits in any batch of 2 to 16
rows. A single row has its own kernels, which sum in another order.
"""
