"""Experiments: policies on workloads, over seeds, into a table and a figure.

``experiment`` says what one is, ``table`` knows every one by name, ``runs`` runs its grid over processes and keeps
what was measured, ``page`` writes it down. ``main`` is the command.
"""
