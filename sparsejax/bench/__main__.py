"""Runs the benchmark; see `python -m sparsejax.bench --help`."""

from sparsejax.bench._command import main

if __name__ == "__main__":
    main()
