"""What ``jaxserve bench`` measures: servers from outside, offline generation, starts; and its curves."""
