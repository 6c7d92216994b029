"""`python -m sparsejax.bench quality`: does every method train as well as dense?"""
