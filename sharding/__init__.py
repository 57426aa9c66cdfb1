"""Meshes, logical axes and the rules that map one to the other. Imports only JAX and itself."""
