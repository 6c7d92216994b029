"""`python -m sparsejax.bench`: is it worth it on your machines?"""
