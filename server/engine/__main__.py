"""``python -m server.engine --config FILE --replica standard-0``: run and watch one engine."""

from __future__ import annotations

import sys

from rollout import positions
from rollout.config import ConfigError, arguments, read
from server.engine import launch
from server.engine.supervisor import Busy, Supervisor


def main() -> int:
    parser = arguments("Runs and watches one engine.")
    parser.add_argument("--replica", required=True, help="which replica, as standard-0")
    args = parser.parse_args()
    try:
        replica = launch.replica(read(args.config, args.overrides), args.replica)
        positions.check_length(replica.model, replica.engine.max_model_len)
        plan = launch.launch(replica, launch.detect(replica.engine))
        plan.notes.extend(launch.check_accepted(replica))
        with Supervisor(replica.id, replica.tier, plan) as supervisor:
            supervisor.run()
    except (ConfigError, Busy) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
