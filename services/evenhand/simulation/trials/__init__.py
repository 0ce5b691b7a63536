"""Policy experiments: simulated engines, one policy, one workload, and what came of it.

``workload`` says what a workload is, ``workloads`` makes the known ones from a seed, ``trial`` runs one under one
policy, ``measures`` reads the result. ``main`` is ``evenhand simulate policies``.
"""
