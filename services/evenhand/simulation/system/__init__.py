"""Simulation of the whole system: real services on a virtual event loop, between a simulated broker, database,
network, engines' sockets and clients.

What always holds: a run is a function of its seed and options alone; it reads no wall clock, opens no socket or
file and draws all chance from the seed. What it does not model is listed in ``docs/simulation.md``.
"""
