"""Ways to place many tenants' requests on workers, behind one interface: Evenhand, and its published rivals.

``policy`` is the interface, ``table`` knows every policy by name. All of them are pure: time is an argument, and
what is random is drawn from a seed that is one too.
"""
