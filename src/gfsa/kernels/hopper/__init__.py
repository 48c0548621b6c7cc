"""Backward kernels for Hopper GPUs in Gluon, with the formulas of ``long/backward.py``.

Each number is written by one program, so repeated runs give the same bits; dQ of long sequences of
wide heads, which is added up in any order (``keys.py``), is the exception. What makes them faster
than those is when a product is waited for, which Triton's compiler decides by itself and Gluon
leaves to the kernel: exponentials are computed while the next products run. No product is in flight
at the end of a step, since the assembler runs all of them one by one where one is. Registers and
shared memory are small enough for three programs on a multiprocessor at head dims up to 64 (four of
the first kernel), which fill each other's gaps.

Tokens, logsumexps and δ come by the copy engine, one step ahead; loads begin while products run,
since all warps wait for each other between them. Rows beyond the last token read as zeros: a query
among them adds nothing, since its g, dU and δ are zero.
"""
