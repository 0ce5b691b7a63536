"""What can go wrong, by whose doing.

::

    EvenhandError
    ├── InvalidInput          you broke it: the call, the file or the setting is wrong
    │   ├── InvalidConfig     a setting that stops the start, named in one sentence
    │   ├── InvalidRequest    a request that can never be served as it stands
    │   └── UnknownTicket     a ticket that was never granted here, or is forgotten
    ├── PeerError             the peer broke it: bytes or behaviour outside the contract
    │   ├── MalformedMessage  bytes that do not decode, or decode to nonsense
    │   └── SchemaMismatch    a version this build does not know
    └── Unavailable           nobody broke it: a part is away; trying again may help
        └── Fenced            another writer owns this; stop at once

Every message is one sentence that names the thing.
"""


class EvenhandError(Exception):
    """Root of everything this package raises on purpose."""


class InvalidInput(EvenhandError):
    """The caller's input is wrong; trying again unchanged cannot help."""


class InvalidConfig(InvalidInput):
    """A setting is unknown or impossible; the start stops."""


class InvalidRequest(InvalidInput):
    """A request can never be served as it stands."""


class UnknownTicket(InvalidInput):
    """A ticket was never granted here, or has been forgotten."""


class PeerError(EvenhandError):
    """A peer sent bytes, or behaved, outside the contract."""


class MalformedMessage(PeerError):
    """Bytes do not decode, or decode to nonsense."""


class SchemaMismatch(PeerError):
    """A schema or protocol version this build does not know."""


class Unavailable(EvenhandError):
    """A part is away; the same call may succeed later."""


class Fenced(Unavailable):
    """Another writer owns this state; this one must stop at once."""
