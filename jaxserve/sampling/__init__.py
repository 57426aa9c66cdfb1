"""Sampling on the device: what a step asks for, what is remembered between steps, and ``sample``."""
