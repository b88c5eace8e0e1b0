"""`python -m tests.integration.chaos --seed S --num-faults N`: break a real stack N times; exit 1 if an
invariant broke.

The seed decides which faults come in which order, what is submitted, and each fault's draws. The machine decides in
which moment of a validation they strike, so a replay meets the same sequence, not the same microsecond.
"""

from __future__ import annotations

import argparse
import sys
import time

from .campaign import run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.integration.chaos")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--num-faults", type=int, default=100)
    options = parser.parse_args()
    began_s = time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - began_s:8.1f} s {line}", flush=True)

    outcome = run(options.seed, options.num_faults, tell)
    print(
        f"{outcome.num_faults} faults, {outcome.num_validations} validations in {outcome.seconds:.0f} s: {outcome.ends}"
    )
    for complaint in outcome.complaints:
        print(f"BROKEN: {complaint}")
    print(f"{len(outcome.complaints)} invariants broken" if outcome.complaints else "no invariant broken")
    print(f"replay: python -m tests.integration.chaos --seed {options.seed} --num-faults {options.num_faults}")
    return 1 if outcome.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
