"""What failures and checkpoints cost: keeping states, failed ranks and hosts, asynchronous saves.

    python benchmarks/recovery.py                        # all five tables: about 40 minutes on 2 cores
    python benchmarks/recovery.py failed_rank            # one of them
    python benchmarks/recovery.py --small                # tiny models, to see that it works

Tables: `commit`, keeping each step's state in memory and replacing a rank (3 minutes); `failed_rank`, `fz.run` compared
with torchrun's restarts of FSDP2 and DeepSpeed (8 minutes); `failed_host`, a host is killed or stopped and another one
joins (10 minutes); `saves`, asynchronous checkpoints compared with torch's (10 minutes); `restores`, a save and a
restore of 1 GB compared with torch's (4 minutes).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import backend_flag, chosen, model_flags, parsed, publish, script_parser, settings
from recovery_tables import commit, failed_host, failed_rank, restores, saves

TABLES: dict[str, Any] = {
    "commit": commit, "failed_rank": failed_rank, "failed_host": failed_host, "saves": saves, "restores": restores
}  # fmt: skip


def main() -> None:
    args = arguments()
    if args.worker:
        TABLES[args.table].worker(args)
        return
    for name in args.tables:
        module = TABLES[name]
        preset = {**module.DEFAULTS, **(module.TINY if args.small else {})}
        given = {key: value for key, value in vars(args).items() if value is not None or key not in preset}
        own = argparse.Namespace(**{**preset, **given})
        found = module.measure(own)
        data = {"settings": settings(own, "path", "contestant", "table", "tables", "name"), **found.data}
        publish(module.NAME, found.title, found.columns, found.rows, found.notes, data, args.out)


def arguments() -> argparse.Namespace:
    parser = script_parser(__doc__, "recovery", small="tiny models and few rounds")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"{', '.join(TABLES)}; default: all")
    model_flags(parser, processes=None, steps=None, rounds=None, warmup=None)
    parser.add_argument("--every", type=int, help="steps per save")
    parser.add_argument("--kill", type=int, nargs="*", help="steps before which a rank is killed")
    parser.add_argument("--only", nargs="+", help=f"of failed_rank {', '.join(failed_rank.TITLES)}; of saves "
                        f"{', '.join(saves.WAYS)}; of restores {', '.join(restores.WAYS)}; of failed_host "
                        "the first column")  # fmt: skip
    parser.add_argument("--path", type=Path, help="folder on the disk to save to; default: the one of temporary files")
    backend_flag(parser, default=None)
    parser.add_argument("--table", choices=list(TABLES), help=argparse.SUPPRESS)
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    args = parsed(parser)
    args.tables = chosen(parser, args.tables, TABLES)
    return args


if __name__ == "__main__":
    main()
