"""The loops generator: `LoopKernel`s as CUDA C.

`generator` plans launches and names variants, `emitter` writes statements and expressions, `structure` says what a
kernel's loops allow, `ranges` whether 32-bit indices suffice, `operations` has the C text of each scalar operation.
"""
