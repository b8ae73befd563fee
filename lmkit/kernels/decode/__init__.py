"""The kernels of a decode step: one more token of each of a few texts, at the speed of the memory.

* `reference`: the step by PyTorch operations, to read and for CPUs;
* `products`: the matrices, with RMSNorm, residual sum, SwiGLU and the rules of logits fused in;
* `attention`: RoPE, the cache's new key and value, attention to all old ones;
* `sampling`: the next token and its embedding;
* `cache`: the keys and values of a whole text into its row.

A step is a chain of five kernels a layer, too short to be launched one after the other: each asks for what no kernel
of the step writes (weights, old keys), waits for the kernel before it, and lets the next kernel begin (programmatic
dependent launch, PDL). Those of a single row let it begin before they wait, so that as many kernels have begun as
there is room for: before its wait a kernel must not read what any of them writes. All programs of a kernel but those
that leave at once must wait, or the kernel after it may pass its wait before the kernel before it has ended.

A row of the batch is summed in an order that depends on its own length alone. So 2 to 16 rows give the same bits as
any of them among others; a single row has kernels of its own, which sum in another order.
"""
