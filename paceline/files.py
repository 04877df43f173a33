"""`paceline init`, `check`, `bundle` and `key`: the files that an operator keeps.

Knows the options only; what the files mean is in `deployments`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paceline.serve import add_model_options, overridden


def add_file_parsers(commands: Any) -> None:
    """Add `init`, `check`, `bundle` and `key` to the command's subparsers."""
    init = commands.add_parser(
        "init",
        help="write deployment files or Kubernetes manifests into a folder, to be edited there",
        description="Without options: copy the deployment files that ship with Paceline into a folder. With options "
        "about the model: write one deployment file for them. With --kubernetes: write the manifests. Existing files "
        "are kept.",
    )
    init.add_argument("folder", type=Path, metavar="FOLDER", help="made if it does not exist")
    init.add_argument("--kubernetes", action="store_true", help="manifests for KubeRay instead of a deployment file")
    init.add_argument("--image", help="image of the pods (default: paceline:cpu or paceline:cuda)")
    init.add_argument("--replicas", type=int, metavar="N", help="number of replicas")
    add_model_options(init)
    init.set_defaults(run=_init)
    check = commands.add_parser("check", help="check deployment files without a cluster")
    check.add_argument("files", type=Path, nargs="+", metavar="FILE")
    check.set_defaults(run=_check)
    bundle = commands.add_parser(
        "bundle",
        help="make a zip for a Ray cluster whose nodes do not have Paceline installed",
        description="Write the project as a working_dir zip, and a deployment file that names it, into a folder. "
        "Copy the zip to --url, then `serve deploy` the file.",
    )
    bundle.add_argument("folder", type=Path, metavar="FOLDER", help="made if it does not exist")
    bundle.add_argument("--config", type=Path, help="deployment file (default: the shipped one)")
    bundle.add_argument(
        "--url", help="folder that all nodes reach and the zip is copied to, such as s3://bucket (default: FOLDER)"
    )
    bundle.add_argument("--pip", action="store_true", help="let Ray install the requirements on each node as well")
    bundle.set_defaults(run=_bundle)
    key = commands.add_parser(
        "key",
        help="make an API key",
        description="Make an API key, print it once, and append its hash to a key file; limits may be added there.",
    )
    key.add_argument("name", help="name of the key's owner, for limits and logs")
    key.add_argument("--file", type=Path, default=Path("keys.yaml"), help="key file (default: keys.yaml)")
    key.set_defaults(run=_key)


def _init(options: argparse.Namespace) -> int:
    from deployments.local import init_files

    for path, is_new in init_files.write_all(options.folder, _init_contents(options)):
        print(f"{path}{'' if is_new else ': exists, kept'}")
    return 0


def _init_contents(options: argparse.Namespace) -> dict[str, str]:
    """What `init` writes, by file name."""
    import yaml

    from deployments.local import init_files, yaml_config
    from engine.errors import ConfigError

    def chosen(args: dict[str, Any]) -> dict[str, Any]:
        replicas = {} if options.replicas is None else {"num_replicas": options.replicas}
        return overridden(args, options) | replicas

    if options.kubernetes:
        return init_files.manifests(chosen, image=options.image)
    if options.image is not None:
        raise ConfigError(f"--image: {options.image} given; it is for --kubernetes")
    shipped = yaml_config.load(yaml_config.DEFAULT_FILE)
    args = yaml_config.only_application(shipped)["args"]
    if (wanted := chosen(args)) == args:
        return init_files.examples()
    values = yaml_config.with_overrides(shipped, args=wanted)
    return {"deployment.yaml": yaml.safe_dump(values, sort_keys=False)}


def _check(options: argparse.Namespace) -> int:
    from deployments.local import yaml_config
    from deployments.local.weights import cache_line

    for file in options.files:
        values = yaml_config.load(file)
        yaml_config.check_serve_schema(values, file)
        print(f"{file}: ok")
        for settings in yaml_config.check(values):
            print(f"  {settings.served_name}: {yaml_config.describe_upgrade(settings)}")
            if (cache := cache_line(settings.engine)) is not None:
                print(f"  {cache}")
    return 0


def _bundle(options: argparse.Namespace) -> int:
    from deployments.local import yaml_config
    from deployments.local.bundle import write_bundle

    config = options.config or yaml_config.DEFAULT_FILE
    made = write_bundle(config, options.folder, url=options.url, with_requirements=options.pip)
    print(f"{made.archive}: {made.archive.stat().st_size / 1e6:.1f} MB, to be at {made.address}")
    print(f"serve deploy {made.deployment}")
    return 0


def _key(options: argparse.Namespace) -> int:
    from deployments.http.keys import add_key

    print(add_key(options.file, options.name))
    return 0
