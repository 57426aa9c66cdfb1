"""The device side: batches, buckets, compilation, the jitted step."""
