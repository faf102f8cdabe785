# SPDX-License-Identifier: Apache-2.0
"""The command line. Imports stand where they are used: help and inspection start at once."""

import argparse
import sys
from pathlib import Path
from typing import Any

from molt.records import ConfigError, MoltError

FOUND_BAD = 1
BAD_INPUT = 2
FAILED = 3


def main(argv: list[str] | None = None) -> int:
    """Run one command; every known error is one line on stderr and an exit status."""
    sys.path.insert(0, str(Path.cwd()))  # the user's agents and recipes lie here
    args = _parser().parse_args(argv)
    try:
        return args.command(args)
    except ConfigError as e:
        print(f"molt: {e}", file=sys.stderr)
        return BAD_INPUT
    except MoltError as e:
        print(f"molt: {e}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="molt",
        description="Reinforcement learning of language-model agents on Slurm clusters.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    train = _with_config(commands, "train", _train, "run or resume on this machine")
    train.add_argument("--run-dir", help="the run's directory (default: run.dir, runs/<name>)")
    sft = _with_config(commands, "sft", _sft, "supervised training on conversations")
    sft.add_argument("--run-dir", help="where the result goes")
    export = commands.add_parser("export", help="write a checkpoint as a Hugging Face directory")
    export.add_argument("run", type=Path)
    export.add_argument("--step", type=int, help="default: the newest")
    export.add_argument("--to", type=Path, required=True)
    export.set_defaults(command=_export)
    inspect = commands.add_parser("inspect", help="what is in a run's shards")
    inspect.add_argument("run", type=Path)
    inspect.add_argument("--group", type=int, help="one group (evaluation groups are negative)")
    inspect.add_argument(
        "--rollout", type=int, default=None, help="one rollout of the group, by token"
    )
    inspect.add_argument(
        "--limit", type=int, default=20, help="groups to list, the newest (default 20)"
    )
    inspect.set_defaults(command=_inspect)
    verify = commands.add_parser("verify", help="whether everything in a run is still whole")
    verify.add_argument("run", type=Path)
    verify.set_defaults(command=_verify)
    doctor = commands.add_parser("doctor", help="what a filesystem and this machine promise")
    doctor.add_argument("directory", type=Path)
    doctor.set_defaults(command=_doctor)
    role = commands.add_parser("role", help="one process of a run; started by the launchers")
    role.add_argument("name", choices=["coordinator", "engine", "runner", "trainer"])
    role.add_argument("run", type=Path)
    role.set_defaults(command=_role)
    return parser


def _with_config(commands: Any, name: str, command: Any, help_text: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=help_text)
    parser.add_argument("config", type=Path, help="a TOML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.set_defaults(command=command)
    return parser


def _train(args: argparse.Namespace) -> int:
    from molt.train import train

    return train(args.config, args.overrides, args.run_dir)


def _sft(args: argparse.Namespace) -> int:
    from molt.config import load
    from molt.trainer import sft

    path = sft.run(load(args.config, args.overrides, args.run_dir))
    print(f"wrote {path}")
    return 0


def _export(args: argparse.Namespace) -> int:
    from molt.trainer.export import export

    print(f"wrote {export(args.run, args.step, args.to)}")
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from molt.inspect import views

    if args.group is None and args.rollout is not None:
        raise ConfigError(
            f"--rollout {args.rollout} needs --group: rollouts are numbered in their group"
        )
    if args.group is None:
        views.overview(args.run, limit=args.limit)
    elif args.rollout is None:
        views.group(args.run, args.group)
    else:
        views.rollout(args.run, args.group, args.rollout)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from molt.store.verify import verify

    problems = 0
    for kind, text in verify(args.run):
        problems += kind == "problem"
        print(f"{kind:8} {text}", flush=True)
    print(f"{args.run} is " + (f"not whole: {problems} problems" if problems else "whole"))
    return FOUND_BAD if problems else 0


def _doctor(args: argparse.Namespace) -> int:
    from molt.inspect.doctor import doctor

    bad = 0
    for verdict, name, text in doctor(args.directory):
        bad += verdict == "bad"
        print(f"{verdict:4} {name:10} {text}", flush=True)
    return FOUND_BAD if bad else 0


def _role(args: argparse.Namespace) -> int:
    from molt.launch.role import run_role

    return run_role(args.name, args.run)


if __name__ == "__main__":
    sys.exit(main())
