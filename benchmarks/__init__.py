"""Benchmarks: wrapped clients against plain transformers + peft, measured in one run (README.md).

One rule: every figure is a ratio of two things that were measured alternately, on the same cores, doing
work whose results were compared first. A figure without its counterpart is not printed.
"""
