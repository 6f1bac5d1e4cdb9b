"""Freezes programs of the gate again, after a change that is meant to change them, and prints what has changed.

    python tests/gate/freeze.py                    # compares all, writes those that are not frozen yet
    python tests/gate/freeze.py NAME ...           # writes these, if their numbers have kept their bits
    python tests/gate/freeze.py --numbers NAME ... # also where bits have changed: by at most 1e-6 of a value in fp32

A change of numbers is only right if a commit must change the order of sums. The commit says why, and quotes the largest
relative difference that this script prints.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # where pytest finds the helpers of tests

from gate_programs import PROGRAMS
from gate_record import FROZEN, differences, flat, frozen_record, record_named, recording_processes, relative_difference

LARGEST = 1e-6
"""Of a change in the order of fp32 sums."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs to freeze again")
    parser.add_argument(
        "--numbers", action="store_true", help=f"allow changed bits, up to {LARGEST:g} of a value in fp32"
    )
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in PROGRAMS]:
        parser.error(f"no program named {', '.join(unknown)}; there are {', '.join(PROGRAMS)}")
    FROZEN.mkdir(exist_ok=True)
    failed = False
    with recording_processes() as pool:
        futures = {name: pool.submit(record_named, name) for name in args.names or PROGRAMS}
        for name, future in futures.items():
            failed |= not compare(name, future.result(), write=name in args.names, numbers=args.numbers)
    return int(failed)


def compare(name: str, new: dict, write: bool, numbers: bool) -> bool:
    """Prints how a program differs from its frozen record, and writes it if that is wanted and allowed."""
    old = frozen_record(name)
    if old is None:
        save(name, new)
        print(f"{name}: frozen for the first time")
        return True
    found = differences(old, new)
    changed = [kind for kind, lines in found.items() if lines]
    if not changed:
        print(f"{name}: unchanged")
        return True
    print(f"{name}: changed: {', '.join(changed)}")
    for kind in changed:
        print("\n".join(f"    {line}" for line in found[kind][:12]))
    if found["numbers"]:
        apart = largest_difference(old, new)
        print(f"    largest relative difference of the numbers: {apart:.2e}")
        if not numbers or not apart <= LARGEST:
            print("    not written: " + ("--numbers allows other bits" if not numbers else f"more than {LARGEST:g}"))
            return False
    if not write:
        return False
    save(name, new)
    print("    written")
    return True


def largest_difference(old: dict, new: dict) -> float:
    was, now = flat(old), flat(new)
    found = [relative_difference(was[name], now[name]) for name in was.keys() & now.keys()]
    return max((x for x in found if x is not None), default=0.0)


def save(name: str, new: dict) -> None:
    (FROZEN / f"{name}.json").write_text(json.dumps(new, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
