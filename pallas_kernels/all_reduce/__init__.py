"""Sums over the GPUs of one host: oracle, kernel, and which one a program uses."""
