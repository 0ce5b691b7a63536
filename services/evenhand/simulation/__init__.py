"""The whole system on a virtual clock: what is decided is real, what surrounds it is simulated and seeded.

``system`` runs every service in one process and checks what must always hold, under faults. Nothing here is
imported by a service.
"""
