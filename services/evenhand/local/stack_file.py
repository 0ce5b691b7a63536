"""What ``evenhand up`` is told: the user's engines and tenants, from options or from one YAML file.

::

    pool: llama-3-8b
    workers:
      - address: http://gpu-1.internal:8000        # where clients call the engine; host names are fine
        kv_events: tcp://gpu-1.internal:5557       # vLLM's --kv-events-config endpoint
        replay: tcp://gpu-1.internal:5657          # its replay_endpoint, if it has one
        worker_id: gpu-1                           # default: host-port of the address
        slots: 256                                 # its --max-num-seqs; default 64
    tenants:
      - {tenant_id: search, weight: 3}
      - {tenant_id: batch}

A worker without ``kv_events`` joins with an approximate map: what it holds is assumed from what it was sent.
"""

import re
from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from evenhand.core.errors import InvalidConfig
from evenhand.core.ids import PoolId, WorkerId
from evenhand.postgres.seed import SeedApiKey, SeedFile, SeedTenant
from evenhand.worker.config import EdgeConfig

WORKERS_MAX = 1_024
_ADDRESS = re.compile(r"https?://[^/\s]+:\d{1,5}")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _address(text: str) -> str:
    if not _ADDRESS.fullmatch(text):
        raise ValueError(f"the engine's address {text!r} is not http://HOST:PORT")
    return text


class StackWorker(_Strict):
    """One engine."""

    address: Annotated[str, AfterValidator(_address)]
    """``http://HOST:PORT`` of the engine."""
    kv_events: str = ""
    replay: str = ""
    worker_id: Annotated[str, Field(max_length=200)] = ""
    slots: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Sequences the engine runs at once, its ``--max-num-seqs``."""

    @property
    def name(self) -> str:
        """The worker id, or host-port of the address where none is given."""
        return self.worker_id or urlsplit(self.address).netloc.replace(":", "-")

    @model_validator(mode="after")
    def _replay_needs_events(self) -> Self:
        if self.replay and not self.kv_events:
            raise ValueError(f"worker {self.name} has a replay endpoint but no kv_events endpoint")
        return self

    @model_validator(mode="after")
    def _its_edge_takes_it(self) -> Self:
        try:
            EdgeConfig(
                worker_id=WorkerId(self.name),
                pool_id=PoolId("any"),
                address=self.address,
                kv_events=self.kv_events,
                replay=self.replay,
                sends_events=bool(self.kv_events),
                slots=self.slots,
            )
        except InvalidConfig as error:
            raise ValueError(str(error).removesuffix(".")) from error
        return self


class StackFile(_Strict):
    """Everything ``evenhand up`` needs to know."""

    pool: Annotated[str, Field(min_length=1, max_length=200)] = "default"
    workers: Annotated[tuple[StackWorker, ...], Field(min_length=1, max_length=WORKERS_MAX)]
    tenants: Annotated[tuple[SeedTenant, ...], Field(min_length=1)] = (SeedTenant(tenant_id="default"),)

    @model_validator(mode="after")
    def _names_are_unique(self) -> Self:
        for what, names in (
            ("worker", [worker.name for worker in self.workers]),
            ("tenant", [tenant.tenant_id for tenant in self.tenants]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{what} {twice[0]} is named twice")
        return self

    def seed(self) -> SeedFile:
        """Tenants, and one API key for each; a tenant's principal is named after it."""
        keys = [SeedApiKey(principal=tenant.tenant_id, tenants=[tenant.tenant_id]) for tenant in self.tenants]
        return SeedFile(tenants=list(self.tenants), api_keys=keys)


def parse_stack(data: object, source: str) -> StackFile:
    """Validate; raises ``InvalidConfig`` with one sentence that names the first fault and its place."""
    try:
        return StackFile.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the document"
        raise InvalidConfig(f"{source}: {place}: {first['msg'].removeprefix('Value error, ')}.") from error


def load_stack(path: Path) -> StackFile:
    """Read a YAML file; raises ``InvalidConfig`` with one sentence that names the file and the fault."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidConfig(f"The stack file {path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        detail = " ".join(str(error).split())
        raise InvalidConfig(f"The stack file {path} is no YAML: {detail}.") from error
    return parse_stack(data, f"The stack file {path}")
