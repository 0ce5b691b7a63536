"""``docker-compose.yml`` and the Dockerfile say only what the code can do; judged without Docker.

Commands go through the commands' own parsers, variables are those that the code reads, health checks ask pages
that the service serves. What only Docker can tell (images, networks, start-up order) is not told here.
"""

import re
import shlex
import shutil
import ssl
import subprocess
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from evenhand.cli import COMMANDS
from evenhand.core.errors import InvalidConfig
from evenhand.engine.config import parse_arguments as parse_engine
from evenhand.loopback import is_loopback
from evenhand.options import DSN_VARIABLE, KAFKA_VARIABLE, require_given
from evenhand.postgres import migrate, seed
from evenhand.postgres.seed import parse_seed
from evenhand.scheduler import main as scheduler
from evenhand.scheduler.config import DaemonConfig
from evenhand.state.main import parse as parse_state
from evenhand.worker.main import parse as parse_edge

ROOT = Path(__file__).parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}
DOCKERFILE = (ROOT / "services" / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TLS_FOLDER = "/run/evenhand/tls"


def parse_scheduler(argv: list[str]) -> DaemonConfig:
    options = scheduler.parser()
    arguments = options.parse_args(argv)
    require_given(options, arguments, "dsn", "kafka")
    return scheduler.config_of(arguments)


PARSERS: dict[str, Callable[[list[str]], object]] = {
    "engine": parse_engine,
    "scheduler": parse_scheduler,
    "state": parse_state,
    "worker-edge": parse_edge,
    "migrate": migrate.parse,
    "seed": seed.parse,
}
PAGES_SOURCE = {"state": "pages.py", "scheduler": "scheduler/daemon.py", "worker-edge": "pages.py",
                "engine": "engine/server.py"}  # fmt: skip


class ReadVariables(dict[str, str]):
    """An environment that remembers what was looked up."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        super().__init__(variables)
        self.looked_up: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.looked_up.add(name)
        return super().get(name, default)

    def __getitem__(self, name: str) -> str:
        self.looked_up.add(name)
        return super().__getitem__(name)


def commands_of(service: dict[str, Any]) -> Iterator[list[str]]:
    """Command lines of ``evenhand`` that a service runs, without the program's name."""
    if "entrypoint" not in service:
        yield service["command"]
        return
    for line in "\n".join(service["command"]).splitlines():
        words = shlex.split(re.sub(r">>?\s*\S+", "", line))
        if words[:1] == ["evenhand"]:
            yield words[1:]


def every_command() -> list[tuple[str, list[str]]]:
    return [(name, argv) for name, service in OURS.items() for argv in commands_of(service)]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ReadVariables]:
    """Puts a service's environment in the place of this process's."""

    def put(name: str) -> ReadVariables:
        variables = ReadVariables(OURS[name].get("environment", {}))
        monkeypatch.setattr("os.environ", variables)
        return variables

    return put


def test_every_part_of_the_product_is_there() -> None:
    run = {argv[0] for _, argv in every_command()}
    assert run == {command.name for command in COMMANDS} - {"up", "demo", "simulate"}
    assert {"kafka", "postgres"} <= SERVICES.keys()


@pytest.mark.parametrize(("name", "argv"), every_command())
def test_commands_and_options_are_real(
    name: str, argv: list[str], environment: Callable[[str], ReadVariables]
) -> None:
    environment(name)
    command, *options = argv
    assert command in {known.name for known in COMMANDS}
    try:
        PARSERS[command](options)
    except SystemExit:
        pytest.fail(f"evenhand {command} does not take {options}")


@pytest.mark.parametrize("name", OURS)
def test_variables_are_read_by_what_they_are_given_to(
    name: str, environment: Callable[[str], ReadVariables]
) -> None:
    given = environment(name)
    for command, *options in commands_of(OURS[name]):
        PARSERS[command](options)
    assert set(given) <= given.looked_up
    assert all(variable.startswith("EVENHAND_") for variable in given)


def test_variables_are_what_the_parsers_come_to(environment: Callable[[str], ReadVariables]) -> None:
    environment("state")
    state = parse_state(["--metrics-port=1"])
    assert state.kafka.bootstrap == "kafka:9092"
    assert state.database.dsn.endswith("@postgres:5432/evenhand")
    environment("edge-0")
    assert parse_edge(SERVICES["edge-0"]["command"][1:]).kafka.bootstrap == "kafka:9092"
    environment("migrate")
    assert migrate.parse([]).dsn == seed.parse(["f"]).dsn == state.database.dsn


@pytest.mark.parametrize("command", ["migrate", "seed", "state", "scheduler"])
def test_no_password_is_needed_on_a_command_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    more = {"seed": ["file"], "scheduler": ["--pool=p"]}.get(command, [])
    monkeypatch.delenv(DSN_VARIABLE, raising=False)
    monkeypatch.setenv(KAFKA_VARIABLE, "kafka:9092")
    with pytest.raises(SystemExit) as ended:
        PARSERS[command](more)
    assert ended.value.code == 2
    assert f"the option --dsn (or {DSN_VARIABLE}) is needed" in capsys.readouterr().err
    monkeypatch.setenv(DSN_VARIABLE, "postgresql://somebody:secret@database/x")
    PARSERS[command](more)


@pytest.mark.parametrize("name", [name for name in SERVICES if "healthcheck" in SERVICES[name]])
def test_health_checks_ask_what_is_served(name: str) -> None:
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] == "CMD"
    if name not in OURS:
        return
    program, flag, code = check["test"][1:]
    assert (program, flag) == ("python", "-c")
    compile(code, name, "exec")
    (url,) = map(urlsplit, re.findall(r"http://[^']+", code))
    assert url.hostname == "127.0.0.1"
    ((command, *options),) = commands_of(SERVICES[name])
    assert url.port == _pages_port(command, options)
    source = (ROOT / "services" / "evenhand" / PAGES_SOURCE[command]).read_text()
    assert re.search(rf'web\.get\("{url.path}"|"{url.path}": ', source), f"{command} serves no {url.path}"


def _pages_port(command: str, options: list[str]) -> int:
    if command == "engine":
        return parse_engine(options).port
    (port,) = (option.partition("=")[2] for option in options if option.startswith("--metrics-port="))
    return int(port)


def test_services_that_run_for_long_have_a_health_check() -> None:
    for name, service in SERVICES.items():
        if service.get("restart") != "no":
            assert "healthcheck" in service, name


def test_what_is_waited_for_exists_and_can_come_true() -> None:
    for name, service in SERVICES.items():
        for needed, how in service.get("depends_on", {}).items():
            assert needed in SERVICES, f"{name} waits for {needed}"
            match how["condition"]:
                case "service_healthy":
                    assert "healthcheck" in SERVICES[needed], f"{name} waits for the health of {needed}"
                case "service_completed_successfully":
                    assert SERVICES[needed]["restart"] == "no", f"{name} waits for the end of {needed}"
                case other:
                    assert other == "service_started"
            assert "profiles" not in SERVICES[needed], f"{name} needs {needed}, which may be left out"


def test_whatever_uses_the_database_waits_for_its_schema() -> None:
    for name, service in OURS.items():
        if DSN_VARIABLE in service.get("environment", {}) and name != "migrate":
            assert "migrate" in service["depends_on"], name


def test_one_command_starts_everything() -> None:
    left_out = {name for name, service in SERVICES.items() if "profiles" in service}
    assert left_out == {"show-access"}


def test_addresses_between_services_are_right(environment: Callable[[str], ReadVariables]) -> None:
    for name in (name for name in OURS if name.startswith("edge-")):
        environment(name)
        edge = parse_edge(SERVICES[name]["command"][1:]).edge
        host = urlsplit(edge.address).hostname
        assert host is not None
        engine = parse_engine(SERVICES[host]["command"][1:])
        assert not is_loopback(engine.host)
        assert edge.address == f"http://{host}:{engine.port}"
        assert edge.kv_events == f"tcp://{host}:{engine.kv_events_port}"
        assert edge.replay == f"tcp://{host}:{engine.kv_replay_port}"
        assert edge.worker_id == host
    identities = [parse_edge(SERVICES[name]["command"][1:]).edge for name in OURS if name.startswith("edge-")]
    assert len({edge.worker_id for edge in identities}) == len(identities)
    pools = {edge.pool_id for edge in identities}
    scheduled = parse_scheduler([*SERVICES["scheduler"]["command"][1:], "--dsn=d"])
    assert pools == {scheduled.pool_id}


def test_beyond_loopback_only_with_tls(environment: Callable[[str], ReadVariables]) -> None:
    environment("scheduler")
    options = SERVICES["scheduler"]["command"][1:]
    config = parse_scheduler(options)
    assert config.tls is not None
    bare = [option for option in options if not option.startswith("--tls")]
    with pytest.raises(InvalidConfig, match="beyond loopback, needs TLS"):
        parse_scheduler(bare)
    for name, service in SERVICES.items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name} publishes {port} to everybody"


def test_volumes_and_configs_are_declared_and_shared_as_meant() -> None:
    named: dict[str, set[str]] = {}
    for name, service in SERVICES.items():
        for volume in service.get("volumes", ()):
            source, target = volume.split(":")[:2]
            assert source in COMPOSE["volumes"], f"{name} mounts {source}"
            named.setdefault(source, set()).add(target)
        for config in service.get("configs", ()):
            assert config["source"] in COMPOSE["configs"]
    assert named.keys() == COMPOSE["volumes"].keys()
    assert all(len(targets) == 1 for targets in named.values())
    kept = [option.partition("=")[2] for _, argv in every_command() for option in argv if "/var/lib/" in option]
    assert len(kept) >= 3
    assert SERVICES["kafka"]["environment"]["KAFKA_LOG_DIRS"] in named["kafka"]


def test_the_seed_is_a_seed_file() -> None:
    parsed = parse_seed(COMPOSE["configs"]["seed"]["content"])
    assert {key.principal for key in parsed.api_keys} == {tenant.tenant_id for tenant in parsed.tenants}
    (mounted,) = SERVICES["seed"]["configs"]
    assert ["seed", mounted["target"]] in list(commands_of(SERVICES["seed"]))
    shown = SERVICES["show-access"]["command"][0].split()[1:]
    assert f">>{shown[1]}" in SERVICES["seed"]["command"][0]
    assert shown[0].startswith(TLS_FOLDER)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="the program openssl is not installed")
def test_the_certificates_are_those_the_scheduler_serves_with(tmp_path: Path) -> None:
    (script,) = SERVICES["certificates"]["command"]
    shell = [*SERVICES["certificates"]["entrypoint"], script.replace(TLS_FOLDER, str(tmp_path))]
    for _ in range(2):
        subprocess.run(shell, check=True, capture_output=True, timeout=60)
    made = {option.partition("=")[2] for option in SERVICES["scheduler"]["command"] if "--tls-" in option}
    assert made == {f"{TLS_FOLDER}/server.pem", f"{TLS_FOLDER}/server.key"}
    ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
        tmp_path / "server.pem", tmp_path / "server.key"
    )
    for host in ("-verify_hostname scheduler", "-verify_hostname localhost", "-verify_ip 127.0.0.1"):
        check = ["openssl", "verify", "-CAfile", "ca.pem", *host.split(), "server.pem"]
        subprocess.run(check, check=True, cwd=tmp_path, capture_output=True, timeout=60)


def instructions(name: str) -> list[str]:
    return [line.split(maxsplit=1)[1] for line in DOCKERFILE if line.startswith(f"{name} ")]


def test_the_image_is_built_from_what_is_there() -> None:
    build = OURS["state"]["build"]
    assert (ROOT / build["dockerfile"]).is_file()
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    for copied in instructions("COPY"):
        for source in copied.split()[:-1]:
            assert (ROOT / source).exists(), f"{source} is copied into the image"
            assert source.removeprefix("./") in allowed, f"{source} is kept from the build by .dockerignore"
    assert all((ROOT / path).exists() for path in allowed)


def test_the_image_runs_our_program_as_nobody_special() -> None:
    (entrypoint,) = instructions("ENTRYPOINT")
    assert entrypoint == '["evenhand"]'
    assert "evenhand" in PROJECT["scripts"]
    assert instructions("USER") == ["evenhand"]
    (base,) = instructions("FROM")
    version = re.search(r"python:(\d+)\.(\d+)", base)
    least = re.search(r"(\d+)\.(\d+)", PROJECT["requires-python"])
    assert version is not None
    assert least is not None
    assert tuple(map(int, version.groups())) >= tuple(map(int, least.groups()))
    folders = {volume.split(":")[1] for service in OURS.values() for volume in service.get("volumes", ())}
    made = " ".join(instructions("RUN"))
    assert all(folder in made for folder in folders), "what is mounted belongs to the user beforehand"


def test_the_image_has_all_that_the_services_need() -> None:
    lock = (ROOT / "requirements-server.txt").read_text()
    locked = {match.lower() for match in re.findall(r"^([A-Za-z0-9._-]+)==", lock, re.MULTILINE)}
    needed = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["server"]]
    names = [re.split(r"[><=!~\[ ]", requirement)[0].lower() for requirement in needed]
    assert set(names) <= locked
    assert "--hash=sha256:" in lock


def test_this_test_can_fail(environment: Callable[[str], ReadVariables]) -> None:
    environment("edge-0")
    with pytest.raises(SystemExit):
        parse_edge([*SERVICES["edge-0"]["command"][1:], "--unheard-of"])
    given = environment("engine-0")
    given["EVENHAND_NEVER"] = "x"
    parse_engine([])
    assert not set(given) <= given.looked_up
