"""Planning a deployment from a config alone: sizes, fit, real TPU compilations and floors, without the hardware."""
