"""`python -m sparsejax.bench quality`: does every method train as well as dense?"""

from sparsejax.bench.quality._pictures import (
    loss_against_seconds,
    quality_against_bytes,
)
from sparsejax.bench.quality._report import Line, format_lines, summarise

__all__ = [
    "Line",
    "format_lines",
    "loss_against_seconds",
    "quality_against_bytes",
    "summarise",
]
