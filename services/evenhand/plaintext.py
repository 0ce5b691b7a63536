"""The one warning of a service that may send to Kafka or Postgres in the clear, beyond its own machine.

It is no refusal: a network of its own may be all the protection that is wanted. But nobody should find out later
that prompts' block keys, load and API keys' hashes crossed a network readable.
"""

from collections.abc import Sequence

from evenhand.logs import get_logger


def warn_of_plaintext(kafka: Sequence[str], postgres: Sequence[str] = ()) -> None:
    """Log one line if there is any host; each is one that is reached without TLS, or need not be reached by it."""
    if kafka or postgres:
        get_logger("start").warning(
            "TLS is not asked of another machine: what is sent there may be read and changed on the way",
            kafka=list(kafka),
            postgres=list(postgres),
        )
