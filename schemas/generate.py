"""Generate ``evenhand.wire.generated`` from the schemas beside this file.

    python schemas/generate.py            write the generated code
    python schemas/generate.py --check    exit 1 if what is committed differs
    python schemas/generate.py --image F  write a descriptor image (for lint and breaking-change checks)

The files are mapped to ``evenhand/wire/generated`` so that their imports match where they live.
"""

import argparse
import filecmp
import os
import sys
import tempfile
from importlib import resources
from pathlib import Path

from grpc_tools import protoc

SCHEMAS = Path(__file__).resolve().parent
SOURCES = SCHEMAS / "evenhand" / "v1"
SERVICES = SCHEMAS.parent / "services"
PACKAGE = "evenhand/wire/generated"


def run_protoc(*arguments: str) -> None:
    google = str(resources.files("google").joinpath(".."))
    bundled = str(resources.files("grpc_tools").joinpath("_proto"))
    code = protoc.main(["protoc", f"-I{google}", f"-I{bundled}", *arguments])
    if code:
        raise SystemExit(f"protoc failed with exit code {code}.")


def generate(target: Path) -> None:
    """Write the package's generated modules below ``target``."""
    names = sorted(f"{PACKAGE}/{path.name}" for path in SOURCES.glob("*.proto"))
    (target / PACKAGE).mkdir(parents=True, exist_ok=True)
    # The mypy plugins are found beside the interpreter, whether its environment is active or not.
    os.environ["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    outputs = [f"--{kind}_out={target}" for kind in ("python", "grpc_python", "mypy")]
    run_protoc(f"-I{PACKAGE}={SOURCES}", *outputs, "--mypy_grpc_out=" + str(target), *names)
    (target / PACKAGE / "__init__.py").write_text(
        '"""Generated from schemas/evenhand/v1; see schemas/generate.py."""\n'
    )


def image(target: Path) -> None:
    """Write a descriptor image with source information, imports included."""
    names = sorted(str(path.relative_to(SCHEMAS)) for path in SOURCES.glob("*.proto"))
    run_protoc(f"-I{SCHEMAS}", "--include_imports", "--include_source_info", f"-o{target}", *names)


def drift() -> list[str]:
    """Names of generated files that differ from what the schemas say."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh, committed = Path(scratch) / PACKAGE, SERVICES / PACKAGE
        names = sorted({p.name for d in (fresh, committed) for p in d.iterdir() if p.suffix in (".py", ".pyi")})
        _, mismatch, errors = filecmp.cmpfiles(fresh, committed, names, shallow=False)
        return sorted(mismatch + errors)


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate the wire code from the schemas.")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--image", type=Path)
    arguments = parser.parse_args()
    if arguments.image:
        image(arguments.image)
    elif arguments.check:
        if names := drift():
            sys.exit("Generated code differs from the schemas: " + ", ".join(names) + "; run schemas/generate.py.")
    else:
        generate(SERVICES)


if __name__ == "__main__":
    main()
