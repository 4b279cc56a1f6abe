"""The operations of `reference/` on the GPU: CUDA C++ in cuda/, compiled at run time, launched on torch's stream.

`ops.py` has one function an operation, of the same name as its specification; `build.py` compiles and keeps
the results on disk; `launch.py` loads and launches. Importing this package touches no GPU.
"""
