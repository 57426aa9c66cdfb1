"""Multi-head latent attention over one cached latent a token: the oracle and the portable implementation."""
