"""Sampling on the device: metadata of a step, state between steps, processors, filters, the sampler,
logprobs.
"""
