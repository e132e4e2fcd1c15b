"""Matmul kernels as CUDA C: tensor-core tiles and rows for 16-bit weights, FMA chains for f32 and f64.

Every variant adds products in the same order, so a result does not depend on how many rows are computed together: k is
cut into at most `CHUNKS` chunks, the products of a chunk are one chain that starts at zero, and the sums of the chunks
are added in order.
"""
