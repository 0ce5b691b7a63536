"""VTC's published measurements, repeated on the simulated engine; see ``docs/results/vtc.md``."""
