"""`python -m sparsejax.bench`: shows whether sparsejax pays off on your machines."""
