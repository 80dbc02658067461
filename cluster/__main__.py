"""Makes `python -m swell.cluster` the same as `swell`."""

import sys

from swell.cluster.cli.main import main

sys.exit(main())
