"""The benchmark suite, installed as `bertfast.benchmarks`."""
