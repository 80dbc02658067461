"""`python -m swell.cluster` is the same as `swell`."""

import sys

from swell.cluster.cli import main

sys.exit(main())
